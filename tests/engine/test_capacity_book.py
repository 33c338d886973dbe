"""Elastic capacity as a book: floors hold, nothing is owned twice, and nothing flaps, whatever comes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.capacity_book import CapacityBook
from services.decoder.kv.hot_class import HotClass, Resize, parcel_slots_for

BLOCK_TOKENS = 4


def book_of(parcels: int, floor: int, most: int, parcel_slots: int = 2) -> CapacityBook:
    return CapacityBook([HotClass(3, parcels, parcel_slots, floor, most)], BLOCK_TOKENS)


class World:
    """A book, and what it has told: the tables that a device would have."""

    def __init__(self, classes: list[HotClass]) -> None:
        self.classes = classes
        self.book = CapacityBook(classes, BLOCK_TOKENS)
        self.owned: list[dict[int, list[int]]] = [{} for _ in classes]
        self.reach: dict[int, int] = {}
        self.tokens: dict[int, int] = {}  # of rows that are seated

    def admit(self, row: int, reach: int, tokens: int) -> bool:
        if not self.book.fits(reach):
            return False
        self.book.admit(row, reach)
        self.reach[row], self.tokens[row] = reach, tokens
        return True

    def leave(self, row: int) -> None:
        self.book.leave(row)
        del self.reach[row], self.tokens[row]
        for owned in self.owned:
            owned.pop(row, None)

    def step(self) -> list[Resize]:
        resizes = self.book.rebalance(self.tokens.items())
        for number, row, parcels in resizes:
            owned = self.owned[number]
            before = owned.get(row, [])
            keeps = min(len(before), len(parcels))
            assert parcels, "a row lost everything"
            assert parcels[:keeps] == before[:keeps], "what a row keeps changed"
            assert len(parcels) != len(before), "a resize that changes nothing"
            others = {parcel for other, held in owned.items() if other != row for parcel in held}
            assert not others & set(parcels), "given away before it was given up"
            owned[row] = parcels
        self.book.check_integrity()
        return resizes

    def need(self, number: int, tokens: int) -> int:
        of = self.classes[number]
        return min(of.most, -(-tokens // (of.parcel_slots * BLOCK_TOKENS)))

    def check(self) -> None:
        for number, of in enumerate(self.classes):
            owned = self.owned[number]
            everything = [parcel for held in owned.values() for parcel in held]
            assert len(set(everything)) == len(everything) <= of.parcels
            assert all(0 <= parcel < of.parcels for parcel in everything)
            for row in self.tokens:
                held = len(owned[row])
                assert held >= min(of.floor, self.need(number, self.reach[row])), "below its floor"
                assert held <= max(of.floor, self.need(number, self.reach[row])), "more than it can ever use"
            if len(self.tokens) == 1:
                (row,) = self.tokens
                assert len(owned[row]) >= self.need(number, self.tokens[row]), "alone, and not whole"


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[HotClass], int, int]:
    size = draw(st.sampled_from([1, 2, 8]))
    floor = draw(st.integers(1, 6))
    most = draw(st.integers(floor, 40))
    # One row's blocks all fit, as "alone, and not whole" presumes: the plan clips `most` to the pool.
    quest = HotClass(3, draw(st.integers(most, 3 * most + 5)), size, floor, most)
    whole = draw(st.integers(1, 20))
    dense = HotClass(1, draw(st.integers(whole, 3 * whole)), 4, whole, whole)
    classes = draw(st.sampled_from([[quest], [dense, quest], [dense]]))
    return classes, draw(st.integers(10, 60)), draw(st.integers(0, 2**20))


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_any_history_keeps_floors_and_owns_nothing_twice(world: tuple[list[HotClass], int, int]) -> None:
    classes, steps, seed = world
    rig, chance = World(classes), random.Random(seed)
    longest = min(of.most * of.parcel_slots for of in classes) * BLOCK_TOKENS
    for _ in range(steps):
        row = chance.randrange(8)
        if row in rig.tokens:
            if chance.random() < 0.3:
                rig.leave(row)
        else:
            reach = chance.randint(1, longest)
            rig.admit(row, reach, chance.randint(1, reach))
        for seated in rig.tokens:
            rig.tokens[seated] = min(rig.reach[seated], rig.tokens[seated] + chance.choice([1, 1, 1, 30]))
        rig.step()
        rig.check()
        assert rig.step() == [], "the same rows once more, and something moved"
    for row in list(rig.tokens):
        rig.leave(row)
    rig.book.check_integrity()
    assert rig.book.fits(longest)


def test_alone_everything_then_equal_shares_then_everything_again() -> None:
    rig = World([HotClass(3, 100, 2, 5, 100)])
    assert rig.admit(0, 1000, 640)
    rig.step()
    assert len(rig.owned[0][0]) == 80 + 11, "its blocks, an eighth and one more"
    assert rig.admit(1, 1000, 640)
    rig.step()
    assert [len(rig.owned[0][row]) for row in (0, 1)] == [50, 50]
    assert rig.admit(2, 200, 80)  # a short one has everything, the long ones share the rest
    rig.step()
    assert [len(rig.owned[0][row]) for row in (0, 1, 2)] == [44, 44, 12]
    rig.leave(1)
    rig.step()
    assert [len(rig.owned[0][row]) for row in (0, 2)] == [88, 12]


def test_floors_are_counted_at_admission() -> None:
    rig = World([HotClass(3, 16, 2, 5, 16)])
    for row in range(3):
        assert rig.admit(row, 1000, 1)
    assert not rig.admit(3, 1000, 1), "16 parcels hold 3 floors of 5"
    assert rig.admit(3, 8, 1), "a row of 8 tokens needs one parcel"
    rig.step()
    rig.check()
    assert not rig.book.fits(1)
    rig.leave(0)
    assert rig.book.fits(1000)


def test_layers_that_read_everything_own_everything_from_the_start() -> None:
    rig = World([HotClass(1, 20, 4, 10, 10), HotClass(3, 20, 4, 2, 10)])
    assert rig.admit(0, 160, 20)
    rig.step()
    assert len(rig.owned[0][0]) == 10
    assert len(rig.owned[1][0]) == 2 + 1
    assert rig.admit(1, 80, 20)
    assert not rig.book.fits(81), "20 parcels less 10 less 5 are 80 tokens"
    assert rig.book.fits(80)


def test_a_row_grows_ahead_of_need_and_rarely() -> None:
    rig = World([HotClass(3, 1000, 8, 5, 1000)])
    rig.admit(0, 20_000, 3200)
    moved = 0
    for _ in range(2000):
        rig.tokens[0] += 1
        due = rig.book.is_due(rig.tokens.items())
        resizes = rig.step()
        assert due or not resizes, "a change that a step running ahead would have missed"
        moved += bool(resizes)
        assert len(rig.owned[0][0]) >= rig.need(0, rig.tokens[0]), "a block came, and no slot was there"
    assert moved <= 8, "2,000 tokens are 62 parcels; each time an eighth of 100 came"


def test_small_differences_take_nothing_from_others() -> None:
    rig = World([HotClass(3, 100, 2, 5, 100)])
    for row, tokens in enumerate((800, 800, 26 * 8)):
        rig.admit(row, 2000, tokens)
    rig.step()
    assert [len(rig.owned[0][row]) for row in range(3)] == [35, 35, 26 + 4]
    rig.tokens[2] += 8
    assert not rig.book.is_due(rig.tokens.items()), "it could use a parcel more, and has three ahead"
    rig.admit(3, 40, 33)
    assert {row for _, row, _ in rig.step()} == {0, 1, 3}, "somebody came, and row 2 takes nothing by the way"
    rig.tokens[2] += 24
    assert [(row, len(parcels)) for _, row, parcels in rig.step() if row == 2] == [(2, 31)]


def test_without_classes_nothing_is_counted() -> None:
    book = CapacityBook()
    assert book.fits(10**9)
    book.admit(0, 10**9)
    assert not book.is_due([(0, 5)])
    assert book.rebalance([(0, 5)]) == []
    book.leave(0)
    book.check_integrity()


def test_the_check_notices() -> None:
    rig = World([HotClass(3, 16, 2, 5, 16)])
    rig.admit(0, 100, 10)
    rig.step()
    pool = rig.book._pools[0]
    pool.free.append(pool.shares[0].parcels[0])
    with pytest.raises(AssertionError, match="owned twice"):
        rig.book.check_integrity()
    pool.free.pop()
    pool.shares[0].floor = 17
    with pytest.raises(AssertionError, match="promised"):
        rig.book.check_integrity()


@pytest.mark.parametrize(("floor", "size"), [(1, 1), (5, 1), (33, 2), (129, 8), (256, 16), (8192, 16)])
def test_parcels_are_small_beside_a_floor(floor: int, size: int) -> None:
    assert parcel_slots_for(floor) == size
