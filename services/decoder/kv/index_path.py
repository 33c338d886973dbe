"""How a selector's index gets into the arena and comes back: in place, or by requests to a remote store.

Knows pages, entries and the records that entries can be made from; not what a selector reads in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.remote_arena import RemoteArena
from services.decoder.kv.shape import KvShape


class IndexPath(Protocol):
    """Of some of the model's layers: one tensor a layer, in their order."""

    def entries(self, place: int) -> Tensor | None:
        """[host pages * blocks a page, entry elements] of the `place`-th layer, for entries as they come.

        None: out of reach; decode's entries are to be given to `write_entries`.
        """

    def load(self, pages: Tensor, pools: Sequence[Tensor]) -> None:
        """Bring pages, `[2, n]` int64 of host pages and device pages, into [device pages, index elements]."""

    def write(self, host_pages: Tensor, pages: Iterable[Tensor]) -> None:
        """[n, index elements] to pages `[n]` int64."""

    def write_entries(self, host_entries: Tensor, entries: Iterable[Tensor]) -> None:
        """[n, entry elements] to entries `[n]` int64 = host page * blocks a page + block."""

    def records(self, host_page: int, block: int) -> Iterator[Tensor]:
        """[groups, block elements]: the records of a block of a page."""


def index_path(
    kernels: StepKernels, arena: ArenaMap | RemoteArena, shape: KvShape, layers: Sequence[int]
) -> IndexPath:
    """The way of `layers` to the index plane of `arena`."""
    if isinstance(arena, ArenaMap):
        return DirectIndexPath(kernels, arena, shape, layers)
    return RemoteIndexPath(arena, shape, layers)


class DirectIndexPath:
    """An IndexPath into an arena that is mapped."""

    def __init__(self, kernels: StepKernels, arena: ArenaMap, shape: KvShape, layers: Sequence[int]) -> None:
        self._kernels = kernels
        self._shape = shape
        self._pages = [arena.index(layer) for layer in layers]
        self._records = [
            arena.kv_blocks(layer).view(-1, shape.groups, shape.blocks_per_page, shape.block_elements)
            for layer in layers
        ]

    def entries(self, place: int) -> Tensor | None:
        """As IndexPath says."""
        return self._pages[place].view(-1, self._shape.entry_elements)

    def load(self, pages: Tensor, pools: Sequence[Tensor]) -> None:
        """As IndexPath says."""
        self._kernels.load_pages(self._pages, pools, pages)

    def write(self, host_pages: Tensor, pages: Iterable[Tensor]) -> None:
        """As IndexPath says."""
        for arena, own in zip(self._pages, pages, strict=True):
            arena.index_copy_(0, host_pages, own)

    def write_entries(self, host_entries: Tensor, entries: Iterable[Tensor]) -> None:
        """As IndexPath says."""
        for arena, own in zip(self._pages, entries, strict=True):
            arena.view(-1, self._shape.entry_elements).index_copy_(0, host_entries, own)

    def records(self, host_page: int, block: int) -> Iterator[Tensor]:
        """As IndexPath says."""
        return (records[host_page, :, block] for records in self._records)


class RemoteIndexPath:
    """An IndexPath by requests: one for everything that is read at once, and what is written is staged."""

    def __init__(self, arena: RemoteArena, shape: KvShape, layers: Sequence[int]) -> None:
        self._arena = arena
        self._shape = shape
        self._layers = tuple(layers)

    def entries(self, place: int) -> Tensor | None:
        """As IndexPath says."""
        return None

    def load(self, pages: Tensor, pools: Sequence[Tensor]) -> None:
        """As IndexPath says.

        Raises:
            HotsetError: as RemoteArena.read says.
        """
        host_pages, device_pages = pages
        size = self._shape.index_elements * self._shape.entry_dtype.itemsize
        nowhere = np.zeros(len(host_pages), np.int64)
        pieces = [
            self._arena.pieces("index", layer, host_pages.numpy(), nowhere, size) for layer in self._layers
        ]
        found = self._arena.read(np.concatenate(pieces)).view(self._shape.entry_dtype)
        for pool, entries in zip(pools, found.view(len(self._layers), len(host_pages), -1), strict=True):
            pool.index_copy_(0, device_pages, entries)

    def write(self, host_pages: Tensor, pages: Iterable[Tensor]) -> None:
        """As IndexPath says, once the arena settles."""
        self._stage(host_pages, np.zeros(len(host_pages), np.int64), pages)

    def write_entries(self, host_entries: Tensor, entries: Iterable[Tensor]) -> None:
        """As IndexPath says, once the arena settles."""
        blocks = self._shape.blocks_per_page
        size = self._shape.entry_elements * self._shape.entry_dtype.itemsize
        self._stage(host_entries // blocks, (host_entries % blocks).numpy() * size, entries)

    def records(self, host_page: int, block: int) -> Iterator[Tensor]:
        """As IndexPath says.

        Raises:
            HotsetError: as RemoteArena.read says.
        """
        shape = self._shape
        group = np.arange(shape.groups)
        offsets = (group * shape.blocks_per_page + block) * shape.block_bytes
        pages = np.full(shape.groups, host_page)
        pieces = [
            self._arena.pieces("kv", layer, pages, offsets, shape.block_bytes) for layer in self._layers
        ]
        found = self._arena.read(np.concatenate(pieces)).view(shape.record_dtype)
        return iter(found.view(len(self._layers), shape.groups, -1))

    def _stage(self, pages: Tensor, offsets: npt.NDArray[np.int64], data: Iterable[Tensor]) -> None:
        for layer, own in zip(self._layers, data, strict=True):
            size = own.shape[1] * own.element_size()
            self._arena.stage(self._arena.pieces("index", layer, pages.numpy(), offsets, size), own)
