"""The device pool of Quest's block bounds, and its copy in the arena's index plane.

Knows pages on both sides. Decode writes a block's bounds through when the block is full (append); those of
the pages that prefill touched are saved here. Whoever takes a full page over finds them beside its records;
those of the open block of a row that was parked are made again from its records.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.shape import KvShape


class BoundsIndex:
    """Bounds of the layers that Quest chooses in: the last ones."""

    def __init__(
        self, arena: ArenaMap, shape: KvShape, device_pages: int, layers: int, device: torch.device
    ) -> None:
        """Allocate `device_pages` pages for each of the last `layers` layers."""
        self._first = shape.layers - layers
        self._block = (-1, shape.blocks_per_page, shape.kv_heads, 2 * shape.head_dim)
        self._shape = shape
        block = (shape.block_tokens, 2, shape.heads, shape.head_dim)
        records = (-1, shape.groups, shape.blocks_per_page, *block)
        self._records = [arena.kv_blocks(layer).view(records) for layer in range(self._first, shape.layers)]
        self._arena = [arena.bounds(layer) for layer in range(self._first, shape.layers)]
        self.pool = torch.zeros(layers, device_pages, shape.bounds_elements, dtype=shape.dtype, device=device)

    def layer(self, layer: int) -> BlockBounds:
        """Both sides of one of the model's layers."""
        place = layer - self._first
        return BlockBounds(self.pool[place].view(self._block), self._arena[place].view(self._block))

    def load(self, pages: Sequence[tuple[int, int]]) -> None:
        """Bring the bounds of pages, given as (host page, device page), from the arena."""
        if not pages:
            return
        host, device = torch.tensor(pages, device=self.pool.device).unbind(1)
        for pool, arena in zip(self.pool, self._arena, strict=True):
            pool.index_copy_(0, device, arena.index_select(0, host))

    def reopen(self, host_page: int, device_page: int, tokens: int) -> None:
        """Set the bounds of the block with the last of a row's `tokens` tokens, which is in these pages."""
        page, block = divmod((tokens - 1) // self._shape.block_tokens, self._shape.blocks_per_page)
        filled = tokens - (page * self._shape.blocks_per_page + block) * self._shape.block_tokens
        for pool, records in zip(self.pool, self._records, strict=True):
            key = records[host_page, :, block, :filled, 0].transpose(0, 1).flatten(1, 2)
            bounds = torch.cat([key, -key], dim=2).amax(0)  # [kv_heads, 2 * head_dim]
            pool.view(self._block)[device_page, block] = bounds

    def save(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy the bounds of pages, given as (host page, device page), to the arena."""
        if not pages:
            return
        host, device = torch.tensor(pages, device=self.pool.device).unbind(1)
        for pool, arena in zip(self.pool, self._arena, strict=True):
            arena.index_copy_(0, host, pool.index_select(0, device))
