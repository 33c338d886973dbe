"""What a store reads for others: pages in the life that is meant, whatever happens while they are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from services.contract.errors import InvalidRequest, NotFound, StaleReference, StateConflict
from services.contract.transport.protocol import Request
from services.kvstore.mapped_source import MappedSource
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.page_request import read_request, write_request
from services.kvstore.page_source import PageSource
from services.kvstore.recency import Pages
from tests.kvstore.world import HEADER, PAGE_COUNT, REMOTE, Client, World

HASHES = [bytes([number]) * 16 for number in range(1, 5)]


class Reader:
    """A client that holds pages, and what stands behind the store's responders."""

    def __init__(self, world: World) -> None:
        self.world, self.client = world, world.client("reader", REMOTE)
        self.client.attach()
        self.source = PageSource(world.store.parts)
        layout = world.store.parts.arena.layout
        assert layout is not None
        self.bytes = PageBytes(world.store.parts.arena.buffer, layout)

    def pages(self) -> list[PageRef]:
        """Four sealed pages, held, of bytes that tell them apart."""
        pages = list(self.client.allocate(len(HASHES)))
        for at, page in enumerate(pages):
            fill = np.full(self.bytes.page_bytes, at + 1, np.uint8)
            self.bytes.unpack(np.array([page.page]), memoryview(fill.tobytes()))
            self.client.seal(page, page_hash=HASHES[at])
        return pages

    def ask(self, refs: Sequence[PageRef], session: int | None = None) -> bytes:
        assert self.client.session is not None
        out = memoryview(bytearray(len(refs) * self.bytes.page_bytes))
        asked = Request(
            session or self.client.session.session_id, memoryview(write_request(PageRefs.of(refs)))
        )
        return bytes(out[: self.source.answer(asked, out)])


@pytest.fixture
def reader(world: World) -> Reader:
    return Reader(world)


def test_pages_come_in_the_order_asked(reader: Reader) -> None:
    pages = reader.pages()
    packed = reader.ask([pages[2], pages[0]])
    assert set(packed) == {1, 3}
    size = reader.bytes.page_bytes // 2  # two layers alike
    assert packed == bytes([3]) * size + bytes([1]) * size + bytes([3]) * size + bytes([1]) * size


def test_only_what_the_session_holds(reader: Reader) -> None:
    pages = reader.pages()
    stranger = reader.world.client("stranger", REMOTE)
    session = stranger.attach().session_id
    with pytest.raises(StateConflict, match="not held"):
        reader.ask(pages[:1], session)
    with pytest.raises(NotFound):
        reader.ask(pages[:1], 12345)
    with pytest.raises(StaleReference):
        reader.ask([PageRef(pages[0].page, pages[0].generation + 1)])
    with pytest.raises(InvalidRequest):
        reader.ask([PageRef(PAGE_COUNT, 1)])
    with pytest.raises(StateConflict, match="not sealed"):
        reader.ask(reader.client.allocate(1))
    reader.client.update(releases=pages[:1])
    with pytest.raises(StateConflict, match="not held"):
        reader.ask(pages[:1])
    assert reader.ask(pages[1:2]) == bytes([2]) * reader.bytes.page_bytes


def _meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Let something happen while pages are copied, between the two looks at their headers."""
    pack = PageBytes.pack

    def slowly(self: PageBytes, pages: Pages, out: memoryview) -> int:
        happens()
        return pack(self, pages, out)

    monkeypatch.setattr(PageBytes, "pack", slowly)


def _taken_by_another(reader: Reader, pages: list[PageRef]) -> Callable[[], object]:
    other: Client = reader.world.client("other", REMOTE)
    other.attach()

    def happens() -> None:
        reader.client.update(releases=pages)
        other.allocate(PAGE_COUNT)

    return happens


def test_a_page_that_changes_hands_while_it_is_copied_is_refused(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = reader.pages()
    _meanwhile(monkeypatch, _taken_by_another(reader, pages))
    with pytest.raises(StaleReference):
        reader.ask(pages)


def test_so_it_is_where_the_arena_is_mapped(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = reader.pages()
    path = reader.world.store.parts.arena.path

    def maps() -> int:
        """How often this process maps the arena; the store here does, too."""
        return Path("/proc/self/maps").read_text().count(str(path))

    before = maps()
    source = MappedSource(path, HEADER)
    asked = Request(0, memoryview(write_request(PageRefs.of(pages))))
    out = memoryview(bytearray(len(pages) * reader.bytes.page_bytes))
    assert source.answer(asked, out) == len(out)
    assert bytes(out) == reader.ask(pages)
    assert maps() == before  # memory of an arena that is removed is free at once
    _meanwhile(monkeypatch, _taken_by_another(reader, pages))
    with pytest.raises(StaleReference):
        source.answer(asked, out)


def test_a_session_that_ends_while_its_pages_are_copied_gets_nothing(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = reader.pages()
    _meanwhile(monkeypatch, reader.client.detach)
    with pytest.raises(NotFound):
        reader.ask(pages)


def test_requests_are_read_as_written() -> None:
    refs = PageRefs.of([PageRef(3, 2**32 - 1), PageRef(0, 0)])
    assert list(read_request(memoryview(write_request(refs)))) == list(refs)
    for body in (b"", b"1234567", bytes(12)):
        with pytest.raises(InvalidRequest):
            read_request(memoryview(body))


def test_too_few_bytes_change_nothing(reader: Reader) -> None:
    pages = reader.pages()
    before = reader.ask(pages)
    with pytest.raises(InvalidRequest):
        reader.bytes.unpack(np.array([0, 1]), memoryview(bytes(100)))
    assert reader.ask(pages) == before
