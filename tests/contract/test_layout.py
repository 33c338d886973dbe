from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.errors import InvalidRequest, SetupError
from services.contract.layout import (
    FILE_HEADER_BYTES,
    MAX_PAGES,
    REGION_ALIGNMENT,
    ArenaLayout,
)
from services.contract.page_header import PAGE_HEADER
from services.contract.planes import ENTRY_ALIGNMENT, Plane, PlaneLayer
from tests.contract.geometries import planes

ARENA_BYTES = st.integers(4 * 2**20, 64 * 2**20)


def regions(layout: ArenaLayout) -> list[tuple[int, int]]:
    """Every region of the file as (start, end), in the order of the layout's own drawing."""
    found = [
        (0, FILE_HEADER_BYTES),
        (
            layout.page_headers_offset,
            layout.page_headers_offset + layout.page_count * PAGE_HEADER.itemsize,
        ),
    ]
    for plane in layout.planes:
        for number, layer in enumerate(plane.layers):
            start = layout.layer_offset(plane.name, number)
            found.append((start, start + layout.page_count * layer.page_bytes))
    return found


@given(planes(), ARENA_BYTES)
def test_regions_are_disjoint_in_order_and_inside_the_file(
    shape: tuple[Plane, ...], arena_bytes: int
) -> None:
    layout = ArenaLayout.fit(arena_bytes, 64, shape)
    found = regions(layout)
    for (_, end), (start, _) in pairwise(found):
        assert end <= start
    assert found[-1][1] == layout.end <= arena_bytes
    assert layout.planes_offset % REGION_ALIGNMENT == 0
    assert all(start % ENTRY_ALIGNMENT == 0 for start, _ in found)


@given(planes(), ARENA_BYTES)
def test_one_page_more_would_not_fit(shape: tuple[Plane, ...], arena_bytes: int) -> None:
    layout = ArenaLayout.fit(arena_bytes, 64, shape)
    assert replace(layout, page_count=layout.page_count + 1).end > arena_bytes


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_exactly_one_page(spare: int) -> None:
    shape = (Plane("kv", (PlaneLayer(2, 4, 512),)),)
    arena_bytes = REGION_ALIGNMENT + 2 * 4 * 512 + spare
    if spare < 0:
        with pytest.raises(SetupError, match="larger --arena-bytes"):
            ArenaLayout.fit(arena_bytes, 64, shape)
    else:
        assert ArenaLayout.fit(arena_bytes, 64, shape).page_count == 1


def test_tiny_pages_stop_at_the_limit() -> None:
    shape = (Plane("kv", (PlaneLayer(1, 1, 16),)),)
    assert ArenaLayout.fit(2**40, 64, shape).page_count == MAX_PAGES


def test_a_large_machine() -> None:
    # DSA: 61 layers, one group, 64 one-token entries of 1,152 bytes, with 132-byte keys rounded up to 144.
    shape = (
        Plane("kv", (PlaneLayer(1, 64, 1152),) * 61),
        Plane("index", (PlaneLayer(1, 64, 144),) * 61),
    )
    layout = ArenaLayout.fit(2**40, 64, shape)
    assert layout.page_count == pytest.approx(2**40 / (61 * 64 * 1296), rel=1e-3)
    assert layout.layer_offset("kv", 1) - layout.layer_offset("kv", 0) == layout.page_count * 64 * 1152
    assert layout.layer_offset("index", 0) == layout.layer_offset("kv", 60) + layout.page_count * 64 * 1152


def test_planes_are_found_by_name() -> None:
    layout = ArenaLayout.fit(4 * 2**20, 64, (Plane("kv", (PlaneLayer(1, 1, 16),)),))
    assert layout.plane("kv") == layout.planes[0]
    assert layout.plane("index") is None
    with pytest.raises(KeyError):
        layout.layer_offset("index", 0)


def test_impossible_planes_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        ArenaLayout.fit(2**30, 64, ())
