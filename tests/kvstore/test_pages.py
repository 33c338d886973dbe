from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from services.contract.errors import HotsetError, InvalidRequest, SetupError, StaleReference, StateConflict
from services.contract.page_header import NO_PAGE, PAGE_HEADER, PageState
from services.kvstore.arena import PageHeaders
from services.kvstore.orders import PageCounts
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.pages import THE_STORE, PageTable
from services.kvstore.seals import Seal, Seals

ANN, BOB = 11, 2**64 - 1
HASH = bytes(range(16))


@pytest.fixture
def headers() -> PageHeaders:
    return np.zeros(6, PAGE_HEADER)


@pytest.fixture
def table(headers: PageHeaders) -> PageTable:
    return PageTable(headers)


def update(
    table: PageTable, holder: int, releases: Sequence[PageRef], seals: Sequence[Seal], wanted: int
) -> list[PageRef] | None:
    pages = table.update(holder, PageRefs.of(releases), Seals.of(seals), wanted)
    return None if pages is None else list(pages)


def adopt(table: PageTable, holder: int, held: Sequence[PageRef]) -> list[PageRef]:
    return list(table.adopt(holder, PageRefs.of(held)))


def take(table: PageTable, holder: int, count: int) -> list[PageRef]:
    pages = update(table, holder, [], [], count)
    assert pages is not None
    return pages


def seal(table: PageTable, holder: int, *pages: PageRef) -> None:
    parents: Sequence[PageRef | None] = [None, *pages]
    seals = [Seal(page, HASH, parent) for page, parent in zip(pages, parents, strict=False)]
    update(table, holder, [], seals, 0)


def test_pages_come_in_order_and_the_last_freed_is_used_first(table: PageTable) -> None:
    pages = take(table, ANN, 3)
    assert pages == [PageRef(0, 1), PageRef(1, 1), PageRef(2, 1)]
    update(table, ANN, [pages[1]], [], 0)
    assert take(table, BOB, 2) == [PageRef(1, 2), PageRef(3, 1)]
    assert table.counts == PageCounts(total=6, free=2, open=4, sealed=0, cached=0)
    table.check_integrity()


def test_all_or_none(table: PageTable) -> None:
    take(table, ANN, 5)
    assert update(table, BOB, [], [], 2) is None
    assert table.counts.free == 1
    assert len(take(table, BOB, 1)) == 1
    assert update(table, BOB, [], [], 2**32 - 1) is None


def test_releases_and_seals_are_done_though_the_allocation_is_not(table: PageTable) -> None:
    first, second, *_ = take(table, ANN, 6)
    assert update(table, ANN, [first], [Seal(second, HASH, None)], 2) is None
    assert (table.counts.free, table.counts.sealed) == (1, 1)


def test_headers_say_what_a_killed_store_must_find(table: PageTable, headers: PageHeaders) -> None:
    first, second, third = take(table, BOB, 3)
    long_hash = bytes(range(100, 132))
    update(table, BOB, [third], [Seal(first, HASH, None), Seal(second, long_hash, first)], 0)
    assert headers["state"].tolist()[:3] == [PageState.SEALED, PageState.SEALED, PageState.FREE]
    assert headers["generation"].tolist() == [1, 1, 1, 0, 0, 0]
    assert headers["owner"][1] == BOB
    assert (headers["hash"][0].tobytes(), headers["hash_bytes"][0]) == (HASH + bytes(16), 16)
    assert (headers["hash"][1].tobytes(), headers["hash_bytes"][1]) == (long_hash, 32)
    assert headers["parent"].tolist()[:2] == [NO_PAGE, 0]
    assert headers["parent_generation"].tolist()[:2] == [0, 1]


def test_a_table_made_of_headers(table: PageTable, headers: PageHeaders) -> None:
    mine, sealed, freed = take(table, ANN, 3)
    take(table, BOB, 1)
    seal(table, ANN, sealed)
    update(table, ANN, [freed], [], 0)
    again = PageTable(headers)
    again.check_integrity()
    assert again.counts == table.counts
    assert (again.held_by(ANN), again.held_by(BOB), again.held_by(THE_STORE)) == (1, 1, 1)
    assert again.release_all(ANN) == 1
    assert take(again, ANN, 1) == [PageRef(mine.page, mine.generation + 1)]


def test_damaged_headers_are_refused(headers: PageHeaders) -> None:
    headers["state"][4] = 3
    with pytest.raises(SetupError, match="header of page 4 is damaged"):
        PageTable(headers)
    headers["state"][4] = PageState.OPEN  # of nobody
    with pytest.raises(SetupError, match="header of page 4 is damaged"):
        PageTable(headers)


def test_a_generation_wraps_and_still_differs(headers: PageHeaders) -> None:
    headers["generation"][0] = 2**32 - 1
    table = PageTable(headers)
    assert take(table, ANN, 1) == [PageRef(0, 0)]


def open_page(table: PageTable) -> PageRef:
    return take(table, ANN, 1)[0]


REFUSED_RELEASES = {
    "no such page": (lambda page: [PageRef(6, 1)], InvalidRequest, "page 6 does not exist"),
    "never allocated": (lambda page: [PageRef(5, 0)], StateConflict, "not held"),
    "stale": (lambda page: [PageRef(page.page, page.generation - 1)], StaleReference, "at generation 1"),
    "from the future": (
        lambda page: [PageRef(page.page, page.generation + 1)],
        StaleReference,
        "at generation 1",
    ),
    "twice in one call": (lambda page: [page, page], StateConflict, "gives that back already"),
}


@pytest.mark.parametrize(("make", "kind", "message"), REFUSED_RELEASES.values(), ids=REFUSED_RELEASES)
def test_releases_that_are_refused(
    table: PageTable, make: object, kind: type[HotsetError], message: str
) -> None:
    page = open_page(table)
    other = open_page(table)
    assert callable(make)
    before = table.counts
    with pytest.raises(kind, match=message):
        update(table, ANN, [other, *make(page)], [Seal(page, HASH, None)], 1)
    assert table.counts == before
    table.check_integrity()


def test_a_page_of_another_holder_is_refused(table: PageTable) -> None:
    page = open_page(table)
    for releases, seals in (([page], []), ([], [Seal(page, HASH, None)])):
        with pytest.raises(StateConflict, match="not held by this session"):
            update(table, BOB, releases, seals, 0)
    assert table.held_by(ANN) == 1


def test_one_release_too_many(table: PageTable) -> None:
    page = open_page(table)
    with pytest.raises(StateConflict, match="not held by this session more than 1 times"):
        update(table, ANN, [page, page], [], 0)
    table.check_integrity()
    assert table.counts.open == 1


def test_released_again(table: PageTable) -> None:
    page = open_page(table)
    update(table, ANN, [page], [], 0)
    with pytest.raises(StateConflict, match="not held"):
        update(table, ANN, [page], [], 0)
    take(table, ANN, 1)
    with pytest.raises(StaleReference):
        update(table, ANN, [page], [], 0)
    assert table.counts.open == 1


def test_seals_that_are_refused(table: PageTable) -> None:
    sealed, first, second = take(table, ANN, 3)
    strange = take(table, BOB, 1)[0]
    seal(table, ANN, sealed)
    seal(table, BOB, strange)
    stale = PageRef(sealed.page, 0)
    cases: list[tuple[list[PageRef], list[Seal], type[HotsetError], str]] = [
        ([], [Seal(sealed, HASH, None)], StateConflict, "sealed already"),
        ([], [Seal(first, HASH, None), Seal(first, HASH, None)], StateConflict, "sealed already"),
        ([first], [Seal(first, HASH, None)], StateConflict, "gives that back already"),
        ([], [Seal(first, HASH[:15], None)], InvalidRequest, "16 to 32 bytes, not 15"),
        ([], [Seal(first, bytes(33), None)], InvalidRequest, "16 to 32 bytes, not 33"),
        ([], [Seal(first, HASH, second)], StateConflict, "which is not sealed"),
        ([], [Seal(first, HASH, first)], StateConflict, "which is not sealed"),
        ([], [Seal(first, HASH, second), Seal(second, HASH, None)], StateConflict, "which is not sealed"),
        ([], [Seal(first, HASH, strange)], StateConflict, "not held"),
        ([sealed], [Seal(first, HASH, sealed)], StateConflict, "gives that back already"),
        ([], [Seal(first, HASH, stale)], StaleReference, "at generation 1"),
    ]
    before = table.counts
    for releases, seals, kind, message in cases:
        # A good seal and an allocation stand beside the bad one: none of it may happen.
        with pytest.raises(kind, match=message):
            update(table, ANN, releases, seals, 1)
        assert table.counts == before
        table.check_integrity()
    update(table, ANN, [], [Seal(second, HASH, sealed), Seal(first, HASH, second)], 0)
    assert table.counts.sealed == 4


def test_a_client_that_comes_back_keeps_what_it_names(table: PageTable, headers: PageHeaders) -> None:
    kept, forgotten, sealed, forgotten_sealed = take(table, ANN, 4)
    seal(table, ANN, sealed, forgotten_sealed)
    assert adopt(table, ANN, [kept, sealed]) == [sealed]
    table.check_integrity()
    assert table.held_by(ANN) == 2
    # Both sealed pages have one hash, and the first is the one that is found.
    assert headers["state"][[forgotten.page, forgotten_sealed.page]].tolist() == [PageState.FREE] * 2
    assert adopt(table, ANN, []) == []
    assert (table.counts.free, table.counts.cached) == (5, 1)


def test_after_a_restart_sealed_pages_are_anybodys_to_claim_and_open_ones_their_owners(
    table: PageTable, headers: PageHeaders
) -> None:
    mine, sealed = take(table, ANN, 2)
    seal(table, ANN, sealed)
    again = PageTable(headers)
    assert adopt(again, ANN, [mine, sealed, sealed]) == [sealed]
    assert adopt(again, BOB, [sealed]) == [sealed]
    assert (again.held_by(ANN), again.held_by(BOB)) == (3, 1)
    again.release_all(THE_STORE)
    again.check_integrity()
    assert again.counts.sealed == 1
    update(again, ANN, [sealed, sealed], [], 0)
    assert again.counts.sealed == 1  # Bob's
    again.release_all(BOB)
    assert again.counts.sealed == 0
    again.check_integrity()


def test_claims_that_are_refused(table: PageTable) -> None:
    mine, sealed, freed = take(table, ANN, 3)
    theirs = take(table, BOB, 1)[0]
    seal(table, ANN, sealed)
    update(table, ANN, [freed], [], 0)
    cases: list[tuple[list[PageRef], type[HotsetError]]] = [
        ([mine, mine], StateConflict),
        ([sealed, sealed], StateConflict),
        ([freed], StateConflict),
        ([theirs], StateConflict),
        ([PageRef(mine.page, 0)], StaleReference),
        ([PageRef(99, 1)], InvalidRequest),
    ]
    for held, kind in cases:
        with pytest.raises(kind):
            adopt(table, ANN, [sealed, *held])
        assert table.held_by(ANN) == 2
        table.check_integrity()


def test_integrity_is_really_checked(headers: PageHeaders) -> None:
    for field, page, value in (("state", 0, 0), ("state", 5, 1), ("owner", 0, BOB), ("state", 1, 2)):
        headers[:] = np.zeros(1, PAGE_HEADER)
        table = PageTable(headers)
        take(table, ANN, 3)
        table.check_integrity()
        headers[field][page] = value
        with pytest.raises(HotsetError, match="page table: "):
            table.check_integrity()
