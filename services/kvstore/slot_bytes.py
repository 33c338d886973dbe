"""The bytes of pieces of pages: gathered out of an arena, and scattered into it.

Knows the layout and a buffer; whose pages they are and whether they live, others say. Small pieces are moved
by one indexed copy for all of one size, long ones each by itself, which saves a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from services.contract.errors import InvalidRequest
from services.contract.layout import ArenaLayout
from services.contract.slot_request import Pieces, regions_of

_Bytes = npt.NDArray[np.uint8]
_Offsets = npt.NDArray[np.int64]
_LONG_BYTES = 4096


class _Alike(NamedTuple):
    """Pieces of one size."""

    size: int
    there: _Offsets  # [n] in the arena
    here: _Offsets  # [n] in the packed bytes


class SlotBytes:
    """Of one mapped arena in one layout."""

    def __init__(self, buffer: memoryview, layout: ArenaLayout) -> None:
        """Look at `buffer`, the whole file."""
        self.layout = layout
        self._arena = np.frombuffer(buffer, np.uint8)
        regions = list(regions_of(layout))
        self._offsets = np.array([region.offset for region in regions], np.int64)
        self._page_bytes = np.array([region.page_bytes for region in regions], np.int64)

    def check(self, pieces: Pieces) -> int:
        """See that each piece lies in its page; the bytes of all together.

        Raises:
            InvalidRequest: there is no such page, region or byte, or a piece is empty.
        """
        sizes = pieces["size"].astype(np.int64)
        bad = (
            (pieces["page"] >= self.layout.page_count)
            | (pieces["region"] >= len(self._offsets))
            | (sizes == 0)
        )
        if not bad.any():
            bad = pieces["offset"].astype(np.int64) + sizes > self._page_bytes[pieces["region"]]
        if bad.any():
            page, _, region, offset, size = pieces[int(bad.argmax())].tolist()
            raise InvalidRequest(f"no page has {size} bytes at {offset} of region {region} (page {page})")
        return int(sizes.sum())

    def gather(self, pieces: Pieces, out: memoryview) -> int:
        """Copy pieces that were checked to the beginning of `out`; how many bytes that were."""
        packed = np.frombuffer(out, np.uint8)
        for alike in self._sorted(pieces):
            _copy(packed, alike.here, self._arena, alike.there, alike.size)
        return int(pieces["size"].sum(dtype=np.int64))

    def scatter(self, pieces: Pieces, data: memoryview) -> None:
        """Copy `data` into pieces that were checked and are as long together."""
        packed = np.frombuffer(data, np.uint8)
        for alike in self._sorted(pieces):
            _copy(self._arena, alike.there, packed, alike.here, alike.size)

    def _sorted(self, pieces: Pieces) -> Iterator[_Alike]:
        sizes = pieces["size"].astype(np.int64)
        region = pieces["region"]
        there = self._offsets[region] + pieces["page"] * self._page_bytes[region] + pieces["offset"]
        here = sizes.cumsum() - sizes
        for size in np.unique(sizes).tolist():
            own = sizes == size
            yield _Alike(size, there[own], here[own])


def _copy(into: _Bytes, targets: _Offsets, source: _Bytes, sources: _Offsets, size: int) -> None:
    if size >= _LONG_BYTES:
        for target, begin in zip(targets.tolist(), sources.tolist(), strict=True):
            into[target : target + size] = source[begin : begin + size]
        return
    _windows(into, size)[targets] = _windows(source, size)[sources]


def _windows(whole: _Bytes, size: int) -> _Bytes:
    """[bytes - size + 1, size]: every run of `size` bytes, as a view."""
    shape = (len(whole) - size + 1, size)
    return as_strided(whole, shape, (1, 1), writeable=whole.flags.writeable)
