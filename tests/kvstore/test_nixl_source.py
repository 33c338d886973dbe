"""Pages read from afar: the bytes as packed, never of a page that changed hands, nor of another arena."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from services.contract.errors import InvalidRequest, StaleReference
from services.contract.layout import ArenaLayout
from services.contract.transport.faults import TransportFault
from services.contract.transport.nixl_memory import Spans
from services.kvstore.nixl_source import NixlSource
from services.kvstore.page_bytes import PageBytes, page_spans
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.page_request import write_request
from tests.kvstore.pair import HEADER as TWO_PLANES
from tests.kvstore.test_page_source import Reader
from tests.kvstore.world import HEADER, OTHER_HEADER, PAGE_COUNT, REMOTE, World


class Near:
    """A FarMemory that is here; `strike` happens before the read of that number."""

    def __init__(self, memory: memoryview) -> None:
        self.memory, self.length = memory, len(memory)
        self.reads: list[int] = []
        self.taken = 0
        self.strikes: dict[int, Callable[[], object]] = {}

    def take(self, length: int) -> memoryview:
        self.taken += 1
        return memoryview(bytearray(length + 100))

    def give(self, buffer: memoryview) -> None:
        self.taken -= 1

    def read(self, spans: Spans, into: memoryview, deadline: float) -> None:
        self.strikes.get(len(self.reads), lambda: None)()
        self.reads.append(len(spans.offsets))
        at = 0
        for offset, length in zip(spans.offsets, spans.lengths, strict=True):
            into[at : at + length] = self.memory[offset : offset + length]
            at += length
        assert at == len(into)


class Far(Reader):
    """A client that holds pages, and one who reads them from afar."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.memory = Near(world.store.parts.arena.buffer)
        self.far = NixlSource(self.memory, HEADER, time.monotonic() + 60)

    def fetch(self, refs: list[PageRef], room: int | None = None) -> bytes:
        length = len(refs) * self.bytes.page_bytes
        out = memoryview(bytearray(length if room is None else room))
        body = memoryview(write_request(PageRefs.of(refs)))
        assert self.far.answer(body, out, time.monotonic() + 60) == length
        assert self.memory.taken == 0
        return bytes(out)

    def let_go(self, pages: list[PageRef]) -> None:
        """The pages are another's, who writes them."""
        other = self.world.client("other", REMOTE)
        other.attach()
        self.client.update(releases=pages)
        for page in other.allocate(PAGE_COUNT):
            self.bytes.unpack(np.array([page.page]), memoryview(bytes(self.bytes.page_bytes)))


@pytest.fixture
def far(world: World) -> Far:
    return Far(world)


def test_pages_come_as_they_are_packed(far: Far) -> None:
    pages = far.pages()
    for chosen in (pages, pages[:1], pages[::-1], [pages[2], pages[0]], [pages[0], pages[1], pages[3]]):
        assert far.fetch(chosen) == far.ask(chosen)
    far.memory.reads.clear()
    far.fetch(pages)
    assert far.memory.reads[1] == 2  # neighbours are one piece, of each of two layers


def test_spans_are_the_packed_order() -> None:
    dice = random.Random(4)
    buffer = memoryview(dice.randbytes(6 * 2**20))
    layout = ArenaLayout.fit(len(buffer), TWO_PLANES.page_tokens, TWO_PLANES.planes)
    packer = PageBytes(buffer, layout)
    for count in (1, 2, 5, 12):
        pages = np.array(dice.sample(range(layout.page_count), count), np.int64)
        for order in (pages, np.sort(pages)):
            packed = bytearray(count * layout.page_bytes)
            packer.pack(order, memoryview(packed))
            pieces = zip(*page_spans(layout, order), strict=True)
            assert b"".join(buffer[at : at + length] for at, length in pieces) == packed


@pytest.mark.parametrize("moment", [0, 1, 2], ids=["before", "before the bytes", "before the second look"])
def test_a_page_that_changes_hands_is_never_taken(far: Far, moment: int) -> None:
    pages = far.pages()
    first = len(far.memory.reads)
    far.memory.strikes[first + moment] = lambda: far.let_go(pages)
    with pytest.raises(StaleReference, match="is not what it was"):
        far.fetch(pages)
    assert len(far.memory.reads) == first + (1 if moment == 0 else 3)  # of no use is not read


def test_only_sealed_pages_in_the_life_that_is_meant(far: Far) -> None:
    pages = far.pages()
    with pytest.raises(StaleReference):
        far.fetch([pages[0], PageRef(pages[1].page, pages[1].generation + 1)])
    with pytest.raises(StaleReference):
        far.fetch(list(far.client.allocate(1)))
    with pytest.raises(InvalidRequest, match="there is no page"):
        far.fetch([PageRef(PAGE_COUNT, 1)])
    with pytest.raises(InvalidRequest, match="there is room for 10"):
        far.fetch(pages, 10)
    assert far.fetch(pages) == far.ask(pages)


def test_another_layout_is_none_of_ours(far: Far) -> None:
    with pytest.raises(TransportFault, match="laid out for something else"):
        NixlSource(far.memory, OTHER_HEADER, time.monotonic() + 60)
    with pytest.raises(TransportFault, match="no arena"):
        NixlSource(Near(memoryview(bytes(range(256)) * 512)), HEADER, time.monotonic() + 60)


def test_an_arena_that_is_laid_out_anew_is_lost(far: Far) -> None:
    pages = far.pages()
    arena = far.world.store.parts.arena
    first = len(far.memory.reads)
    far.memory.strikes[first + 2] = lambda: arena.buffer.__setitem__(slice(16, 20), b"else")
    kept = bytes(arena.buffer[16:20])
    with pytest.raises(TransportFault, match="laid out anew"):
        far.fetch(pages)
    arena.buffer[16:20] = kept
