"""The bytes of whole pages: packed out of an arena, and put into one.

Knows the layout and a buffer; whose pages they are and whether they live, others say. A packed run of pages
lies as the arena does, plane by plane and layer by layer:

    [plane][layer][page in the order given][bytes of a page in that layer]

Both stores derive it from the same layout, so nothing of it travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from services.contract.errors import InvalidRequest
from services.contract.layout import ArenaLayout
from services.kvstore.recency import Pages

_Bytes = npt.NDArray[np.uint8]
_Offsets = npt.NDArray[np.int64]


class PageBytes:
    """Of one mapped arena in one layout."""

    def __init__(self, buffer: memoryview, layout: ArenaLayout) -> None:
        """Look at `buffer`, the whole file."""
        self.layout = layout
        self.page_bytes = layout.page_bytes
        self._regions = tuple(_regions(buffer, layout))

    def pack(self, pages: Pages, out: memoryview) -> int:
        """Copy `pages` to the beginning of `out`; how many bytes that were.

        Raises:
            InvalidRequest: `out` is too short.
        """
        length = len(pages) * self.page_bytes
        if length > len(out):
            raise InvalidRequest(f"{len(pages)} pages have {length} bytes and there is room for {len(out)}")
        for region, part in self._parts(np.frombuffer(out, np.uint8, length), len(pages)):
            np.take(region, pages, 0, out=part, mode="clip")  # the other modes copy twice
        return length

    def unpack(self, pages: Pages, packed: memoryview) -> None:
        """Copy `packed` into `pages`, which nobody reads or writes.

        Raises:
            InvalidRequest: it is not so many bytes.
        """
        if len(packed) != len(pages) * self.page_bytes:
            raise InvalidRequest(f"{len(packed)} bytes are not {len(pages)} pages of {self.page_bytes}")
        for region, part in self._parts(np.frombuffer(packed, np.uint8), len(pages)):
            region[pages] = part

    def _parts(self, packed: _Bytes, count: int) -> Iterator[tuple[_Bytes, Any]]:
        """Each layer's region, and its part of a packed run of `count` pages."""
        at = 0
        for region in self._regions:
            size = region.shape[1]
            yield region, packed[at : at + count * size].reshape(count, size)
            at += count * size


def page_spans(layout: ArenaLayout, pages: Pages) -> tuple[_Offsets, _Offsets]:
    """Where the bytes of `pages` lie in an arena, in the order of a packed run; neighbours are one piece.

    Returns:
        Offsets in the file and lengths, `[pieces]` each, bytes.
    """
    begins = np.concatenate([[0], np.flatnonzero(np.diff(pages) != 1) + 1])
    firsts, counts = pages[begins], np.diff(np.concatenate([begins, [len(pages)]]))
    places = list(_places(layout))
    starts, sizes = (np.array(column, np.int64)[:, None] for column in zip(*places, strict=True))
    return (starts + sizes * firsts).ravel(), (sizes * counts).ravel()


def _regions(buffer: memoryview, layout: ArenaLayout) -> Iterator[_Bytes]:
    """`[pages, bytes of a page]` of every layer of every plane that keeps anything."""
    for start, size in _places(layout):
        region = np.frombuffer(buffer[start : start + layout.page_count * size], np.uint8)
        yield region.reshape(layout.page_count, size)


def _places(layout: ArenaLayout) -> Iterator[tuple[int, int]]:
    """The same as offset in the file and bytes of a page."""
    for plane in layout.planes:
        for number, layer in enumerate(plane.layers):
            if layer.page_bytes:
                yield layout.layer_offset(plane.name, number), layer.page_bytes
