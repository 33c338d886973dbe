"""The device pool of Quest's block bounds, and its copy in the arena's index plane.

Knows pages on both sides. Decode writes a block's bounds through when the block is full (append); those of
the pages that prefill touched are saved here. Whoever takes a full page over finds them beside its records.
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
        self._arena = [arena.bounds(layer) for layer in range(self._first, shape.layers)]
        self.pool = torch.zeros(layers, device_pages, shape.bounds_elements, dtype=shape.dtype, device=device)

    def layer(self, layer: int) -> BlockBounds:
        """Both sides of one of the model's layers."""
        place = layer - self._first
        return BlockBounds(self.pool[place].view(self._block), self._arena[place].view(self._block))

    def load(self, pages: Sequence[tuple[int, int]]) -> None:
        """Bring the bounds of full pages, given as (host page, device page), from the arena."""
        if not pages:
            return
        host, device = torch.tensor(pages, device=self.pool.device).unbind(1)
        for pool, arena in zip(self.pool, self._arena, strict=True):
            pool.index_copy_(0, device, arena.index_select(0, host))

    def save(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy the bounds of pages, given as (host page, device page), to the arena."""
        if not pages:
            return
        host, device = torch.tensor(pages, device=self.pool.device).unbind(1)
        for pool, arena in zip(self.pool, self._arena, strict=True):
            arena.index_copy_(0, host, pool.index_select(0, device))
