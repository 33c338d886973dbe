"""A selector's index: pages on the device, always resident, and their copies in the arena's index plane.

Knows pages on both sides and how large an entry is, one a block; not what a selector reads in it. DSA's index
keys need no more than this: decode writes each one through as it comes, so that whoever takes a page over
finds those of all its tokens. Quest's bounds (bounds_index.py) change until their block is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.shape import KvShape


class Entries(NamedTuple):
    """One layer's entries, both [pages * blocks a page, entry elements]."""

    device: Tensor  # by device page: what select reads
    arena: Tensor  # by host page


class PagedIndex:
    """Entries of the layers that choose."""

    def __init__(
        self, arena: ArenaMap, shape: KvShape, device_pages: int, layers: Sequence[int], device: torch.device
    ) -> None:
        """Allocate `device_pages` pages for each of the model's `layers` that are named."""
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._entry = shape.entry_elements
        self._arena = [arena.index(layer) for layer in layers]
        self.pool = torch.zeros(
            len(layers), device_pages, shape.index_elements, dtype=shape.entry_dtype, device=device
        )

    def entries(self, layer: int) -> Entries:
        """Both sides of one of the model's layers."""
        place = self._places[layer]
        return Entries(self.pool[place].view(-1, self._entry), self._arena[place].view(-1, self._entry))

    def load(self, pages: Sequence[tuple[int, int]]) -> None:
        """Bring the entries of pages, given as (host page, device page), from the arena."""
        if not pages:
            return
        host, device = torch.tensor(pages, device=self.pool.device).unbind(1)
        for pool, arena in zip(self.pool, self._arena, strict=True):
            pool.index_copy_(0, device, arena.index_select(0, host))

    def reopen(self, host_page: int, device_page: int, tokens: int) -> None:
        """Mend the entry of the open block of a row of `tokens` tokens, just loaded: it is right already."""

    def save(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy the entries of pages, given as (host page, device page), to the arena."""
        if not pages:
            return
        host, device = torch.tensor(pages, device=self.pool.device).unbind(1)
        for pool, arena in zip(self.pool, self._arena, strict=True):
            arena.index_copy_(0, host, pool.index_select(0, device))
