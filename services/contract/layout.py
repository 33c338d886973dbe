"""Where everything lies in the arena file: the one place that turns (layer, page) into a byte offset.

Knows the planes' sizes and the file's length; opens nothing.

    [0, 64 KiB)                       file header (file_header.py)
    [64 KiB, + 128 B x pages)         page headers (page_header.py)
    [next 2 MiB boundary, ...)        planes in order; of each plane its layers in order;
                                      of each layer all pages: [page][group][entry][entry_bytes]

Layer-major, because one resolve launch touches one layer and a GPU's address translation reaches only
so far (DESIGN section 3: 48 GB/s while a launch reads within 1 GiB, 31 GB/s within 40).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.contract.byte_size import format_bytes
from services.contract.errors import SetupError
from services.contract.page_header import PAGE_HEADER
from services.contract.planes import Plane, check_planes

LAYOUT_VERSION = 1
FILE_HEADER_BYTES = 64 * 1024
REGION_ALIGNMENT = 2 * 1024 * 1024  # a huge page
MAX_PAGES = 2**24
"""kvstore keeps some 100 bytes of its own a page; this bounds what a client's tiny pages can make of that."""


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The derived placement of `page_count` pages; build one with `ArenaLayout.fit`."""

    arena_bytes: int
    page_tokens: int
    planes: tuple[Plane, ...]
    page_count: int

    @classmethod
    def fit(cls, arena_bytes: int, page_tokens: int, planes: Sequence[Plane]) -> ArenaLayout:
        """As many pages as `arena_bytes` holds, MAX_PAGES at most. Both services derive the same layout
        from the same input.

        Raises:
            InvalidRequest: the planes are impossible.
            SetupError: not even one page fits.
        """
        check_planes(planes)
        page_bytes = sum(plane.page_bytes for plane in planes)
        # `end` grows with the page count, in jumps where the headers cross a boundary: halve the range.
        fits, too_many = 0, min(MAX_PAGES, arena_bytes // (page_bytes + PAGE_HEADER.itemsize)) + 1
        while too_many - fits > 1:
            pages = (fits + too_many) // 2
            if cls(arena_bytes, page_tokens, tuple(planes), pages).end <= arena_bytes:
                fits = pages
            else:
                too_many = pages
        if fits == 0:
            raise SetupError(
                f"an arena of {format_bytes(arena_bytes)} holds no page of {format_bytes(page_bytes)} "
                f"({page_tokens} tokens); start kvstore with a larger --arena-bytes"
            )
        return cls(arena_bytes, page_tokens, tuple(planes), fits)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all planes and layers."""
        return sum(plane.page_bytes for plane in self.planes)

    @property
    def page_headers_offset(self) -> int:
        """Byte offset of the array of page headers."""
        return FILE_HEADER_BYTES

    @property
    def planes_offset(self) -> int:
        """Byte offset of the first plane's first layer."""
        return _align(FILE_HEADER_BYTES + self.page_count * PAGE_HEADER.itemsize, REGION_ALIGNMENT)

    @property
    def end(self) -> int:
        """Byte offset past the last plane."""
        return self.planes_offset + self.page_count * self.page_bytes

    def plane(self, name: str) -> Plane | None:
        """The plane called `name`, if the clients declared it."""
        return next((plane for plane in self.planes if plane.name == name), None)

    def layer_offset(self, name: str, layer: int) -> int:
        """Byte offset of page 0 of `layer` in plane `name`; page p lies p x its page bytes further.

        Raises:
            KeyError: no such plane.
        """
        offset = self.planes_offset
        for plane in self.planes:
            if plane.name == name:
                return offset + self.page_count * sum(part.page_bytes for part in plane.layers[:layer])
            offset += self.page_count * plane.page_bytes
        raise KeyError(name)
