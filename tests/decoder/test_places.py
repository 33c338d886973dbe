"""Which byte is whose: pages, tables of rows, and what a step derives from them, against plain loops."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.contract.errors import SetupError
from services.decoder.kernels.places import blocks_of
from services.decoder.kv.batch import PrefillChunk, decode_batch
from services.decoder.kv.device_pages import DevicePages
from services.decoder.kv.shape import KvShape
from tests.decoder import made_up

EDGES = (0, 1, 3, 4, 5, 11, 12, 13, 23, 24, 47, 59)
"""Positions at, before and behind the edges of blocks of 4 and pages of 12."""


def test_device_pages_are_counted_references() -> None:
    pages = DevicePages(5)
    a = pages.take(3)
    assert a is not None
    assert pages.take(3) is None
    assert pages.free == 2
    pages.share(a[:2])
    pages.give_back(a)
    assert pages.free == 3
    pages.check_integrity()
    pages.give_back(a[:2])
    assert pages.free == 5
    with pytest.raises(ValueError, match="is free already"):
        pages.give_back(a[:1])
    with pytest.raises(ValueError, match="cannot be shared"):
        pages.share(a[:1])
    assert pages.take(0) == []
    pages.check_integrity()


def test_device_pages_never_give_a_page_twice() -> None:
    chance, pages, held = random.Random(7), DevicePages(9), list[int]()
    for _ in range(300):
        if held and chance.random() < 0.5:
            pages.give_back([held.pop(chance.randrange(len(held)))])
        else:
            more = pages.take(chance.randint(0, 4))
            held += more or []
        assert len(set(held)) == len(held)
        assert pages.free == 9 - len(held)
        pages.check_integrity()


@pytest.mark.parametrize("groups", [1, 3])
def test_blocks_of_pages(groups: int) -> None:
    pages = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    got = blocks_of(pages, groups, 3)
    assert got.dtype == torch.int64
    assert got.shape == (2, groups, 9)
    for row in range(2):
        for group in range(groups):
            expected = [(int(page) * groups + group) * 3 + block for page in pages[row] for block in range(3)]
            assert got[row, group].tolist() == expected


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("position", EDGES)
def test_a_decode_batch_names_the_right_places(groups: int, position: int) -> None:
    shape, tables = made_up.shape(groups), made_up.tables()
    rows, positions = [2, 0, 3], [position, 30, 7]
    batch = decode_batch(shape, tables, rows, positions)
    assert batch.most_blocks == max(positions) // 4 + 1
    assert batch.seats.tolist() == rows
    assert batch.open_block.tolist() == [p // 4 for p in positions]
    pages = -(-batch.most_blocks // 3)
    fresh = [p % 4 == 0 for p in positions]
    assert (None if batch.fresh is None else batch.fresh.tolist()) == (fresh if any(fresh) else None)
    for i, (row, at) in enumerate(zip(rows, positions, strict=True)):
        host, device = tables.host_pages[row], tables.device_pages[row]
        assert batch.row_device_pages[i].tolist() == device[:pages].tolist()
        assert int(batch.index_block[i]) == int(device[at // 12]) * 3 + at % 12 // 4
        for group in range(groups):
            lane = i * groups + group
            assert int(batch.lanes[lane]) == row * groups + group
            assert int(batch.lane_open_block[lane]) == at // 4
            assert int(batch.lane_length[lane]) == at + 1
            assert int(batch.lane_offset[lane]) == at % 4
            assert int(batch.host_record[lane]) == made_up.place(shape, host, group, at)
            if batch.lane_fresh is not None:
                assert bool(batch.lane_fresh[lane]) == fresh[i]
            for block in range(at // 4 + 1):
                token = block * 4
                assert int(batch.host_blocks[lane, block]) * 4 == made_up.place(shape, host, group, token)
                assert int(batch.device_blocks[lane, block]) * 4 == made_up.place(shape, device, group, token)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    ("start", "end"), [(0, 1), (0, 4), (0, 12), (4, 5), (8, 13), (12, 24), (20, 60), (0, 60)]
)
def test_a_prefill_chunk_names_the_right_places(groups: int, start: int, end: int) -> None:
    shape, tables, row = made_up.shape(groups), made_up.tables(), 1
    chunk = PrefillChunk.build(shape, tables, row, start, end)
    host, device = tables.host_pages[row], tables.device_pages[row]
    blocks = -(-end // 4)
    assert (chunk.row, chunk.start, chunk.end) == (row, start, end)
    pages = -(-end // 12)
    assert chunk.host_pages.tolist() == chunk.arena_pages.tolist() == host[:pages].tolist()
    assert chunk.device_pages.tolist() == device[:pages].tolist()
    touched = range(start // 4, blocks)
    assert chunk.index_blocks.tolist() == [int(device[block // 3]) * 3 + block % 3 for block in touched]


def test_a_chunk_that_starts_inside_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="starts at token 5, inside a block"):
        PrefillChunk.build(made_up.shape(), made_up.tables(), 0, 5, 9)


def test_shapes_that_cannot_be_are_refused() -> None:
    good = KvShape(
        layers=1,
        kv_heads=4,
        head_dim=8,
        groups=2,
        block_tokens=4,
        page_tokens=8,
        dtype=torch.float32,
    )
    assert good.heads == 2
    changes: tuple[dict[str, Any], ...] = ({"groups": 3}, {"page_tokens": 9})
    for change in changes:
        with pytest.raises(ValueError, match="must divide"):
            replace(good, **change)
    with pytest.raises(SetupError, match=r"12 bytes is not a multiple of 16; raise --block-tokens"):
        replace(good, groups=4, head_dim=3, block_tokens=1, dtype=torch.bfloat16)
