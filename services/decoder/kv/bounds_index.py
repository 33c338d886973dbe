"""The device pool of Quest's block bounds, and its copy in the arena's index plane.

Knows bounds and the records that they come from. Decode writes a block's bounds through when it is full
(append); those of the pages that prefill touched are saved. Whoever takes a full page over finds them beside
its records; those of the open block of a row that was parked are made again from its records.
"""

from __future__ import annotations

import torch

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.paged_index import PagedIndex
from services.decoder.kv.shape import KvShape


class BoundsIndex(PagedIndex):
    """Bounds of the layers that Quest chooses in: the last ones."""

    def __init__(
        self, arena: ArenaMap, shape: KvShape, device_pages: int, layers: int, device: torch.device
    ) -> None:
        """Allocate `device_pages` pages for each of the last `layers` layers."""
        last = range(shape.layers - layers, shape.layers)
        super().__init__(arena, shape, device_pages, last, device)
        self._block = (-1, shape.blocks_per_page, shape.kv_heads, 2 * shape.head_dim)
        self._shape = shape
        block = (shape.block_tokens, 2, shape.heads, shape.head_dim)
        records = (-1, shape.groups, shape.blocks_per_page, *block)
        self._records = [arena.kv_blocks(layer).view(records) for layer in last]

    def layer(self, layer: int) -> BlockBounds:
        """Both sides of one of the model's layers."""
        device, arena = self.entries(layer)
        return BlockBounds(device.view(self._block), arena.view(self._block))

    def reopen(self, host_page: int, device_page: int, tokens: int) -> None:
        """Set the bounds of the block with the last of a row's `tokens` tokens, which is in these pages."""
        page, block = divmod((tokens - 1) // self._shape.block_tokens, self._shape.blocks_per_page)
        filled = tokens - (page * self._shape.blocks_per_page + block) * self._shape.block_tokens
        for pool, records in zip(self.pool, self._records, strict=True):
            key = records[host_page, :, block, :filled, 0].transpose(0, 1).flatten(1, 2)
            bounds = torch.cat([key, -key], dim=2).amax(0)  # [kv_heads, 2 * head_dim]
            pool.view(self._block)[device_page, block] = bounds
