"""The device pool of Quest's block bounds, and its copy in the arena's index plane.

Knows bounds and the records that they come from. Decode writes a block's bounds through when it is full
(append); those of the pages that prefill touched are saved. Whoever takes a full page over finds them beside
its records; those of the open block of a row that was parked are made again from its records.
"""

from __future__ import annotations

import torch

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.paged_index import PagedIndex
from services.decoder.kv.remote_arena import RemoteArena
from services.decoder.kv.shape import KvShape


class BoundsIndex(PagedIndex):
    """Bounds of the layers that Quest chooses in: the last ones."""

    def __init__(
        self,
        kernels: StepKernels,
        arena: ArenaMap | RemoteArena,
        shape: KvShape,
        device_pages: int,
        layers: int,
        device: torch.device,
    ) -> None:
        """Allocate `device_pages` pages for each of the last `layers` layers."""
        last = range(shape.layers - layers, shape.layers)
        super().__init__(kernels, arena, shape, device_pages, last, device)
        self._block = (-1, shape.blocks_per_page, shape.kv_heads, 2 * shape.head_dim)
        self._shape = shape

    def layer(self, layer: int) -> BlockBounds:
        """Both sides of one of the model's layers."""
        device, arena = self.entries(layer)
        return BlockBounds(device.view(self._block), None if arena is None else arena.view(self._block))

    def reopen(self, host_page: int, device_page: int, tokens: int) -> None:
        """Set the bounds of the block with the last of a row's `tokens` tokens, which is in these pages."""
        shape = self._shape
        page, block = divmod((tokens - 1) // shape.block_tokens, shape.blocks_per_page)
        filled = tokens - (page * shape.blocks_per_page + block) * shape.block_tokens
        for pool, records in zip(self.pool, self._path.records(host_page, block), strict=True):
            sides = records.view(shape.groups, shape.block_tokens, 2, shape.heads, shape.head_dim)
            key = sides[:, :filled, 0].transpose(0, 1).flatten(1, 2)
            bounds = torch.cat([key, -key], dim=2).amax(0)  # [kv_heads, 2 * head_dim]
            pool.view(self._block)[device_page, block] = bounds

    def decoded(self, batch: DecodeBatch) -> None:
        """Those of blocks that are full now."""
        if self._path.entries(0) is None and batch.filled is not None:
            self._write_entries(batch.index_block[batch.filled], batch.host_index_block[batch.filled])
