"""A selector's index: pages on the device, always resident, and their copies in the arena's index plane.

Knows pages on both sides and how large an entry is, one a block; not what a selector reads in it. DSA's index
keys need no more than this: decode writes each one through as it comes (where the arena is out of reach, with
the others of its step), so that whoever takes a page over finds those of all its tokens. Quest's bounds
(bounds_index.py) change until their block is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kernels.upload import upload
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.index_path import index_path
from services.decoder.kv.remote_arena import RemoteArena
from services.decoder.kv.shape import KvShape


class Entries(NamedTuple):
    """One layer's entries, both [pages * blocks a page, entry elements]."""

    device: Tensor  # by device page: what select reads
    arena: Tensor | None  # by host page; None: out of reach


class PagedIndex:
    """Entries of the layers that choose."""

    def __init__(
        self,
        kernels: StepKernels,
        arena: ArenaMap | RemoteArena,
        shape: KvShape,
        device_pages: int,
        layers: Sequence[int],
        device: torch.device,
    ) -> None:
        """Allocate `device_pages` pages for each of the model's `layers` that are named."""
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._entry = shape.entry_elements
        self._path = index_path(kernels, arena, shape, layers)
        self.pool = torch.zeros(
            len(layers), device_pages, shape.index_elements, dtype=shape.entry_dtype, device=device
        )

    def entries(self, layer: int) -> Entries:
        """Both sides of one of the model's layers."""
        place = self._places[layer]
        return Entries(self.pool[place].view(-1, self._entry), self._path.entries(place))

    def load(self, pages: Sequence[tuple[int, int]]) -> None:
        """Bring the entries of pages, given as (host page, device page), from the arena."""
        if not pages:
            return
        self._path.load(upload(list(zip(*pages, strict=True)), self.pool.device), self.pool.unbind())

    def reopen(self, host_page: int, device_page: int, tokens: int) -> None:
        """Mend the entry of the open block of a row of `tokens` tokens, just loaded: it is right already."""

    def save(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy the entries of pages, given as (host page, device page), to the arena."""
        if not pages:
            return
        host, device = upload(list(zip(*pages, strict=True)), self.pool.device)
        self._path.write(host, (pool.index_select(0, device) for pool in self.pool))

    def decoded(self, batch: DecodeBatch) -> None:
        """Decode rows have computed a token in every layer: write their entries, where nobody has yet."""
        if self._path.entries(0) is None:
            self._write_entries(batch.index_block, batch.host_index_block)

    def _write_entries(self, device: Tensor, host: Tensor) -> None:
        """[n] int64 entries on both sides."""
        entries = (pool.view(-1, self._entry).index_select(0, device) for pool in self.pool)
        self._path.write_entries(host, entries)
