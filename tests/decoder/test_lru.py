"""The resolve twin against a plain-Python LRU: slots, order, fetches, counters and bytes, step by step."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.kernels.counter import Counter
from services.decoder.kernels.lanes import layer_of
from services.decoder.kernels.lru import assign
from services.decoder.kernels.resolve import resolve
from services.decoder.kernels.step_kernels import LayerStore
from tests.decoder.parcels import Parcels, order_of, places_of
from tests.decoder.plain_lru import PlainLane

CPU = torch.device("cpu")


class Rig:
    """Some rows of one lane each in one layer, seated in scattered parcels, and their oracles."""

    def __init__(
        self, parcels: list[int], max_blocks: int, most: int, parcel_slots: int = 1, seed: int = 0
    ) -> None:
        """`parcels` of each row, which begins in block 0."""
        self.parcels = Parcels(len(parcels), 1, max_blocks, most, parcel_slots, seed=seed, device=CPU)
        self.tables = layer_of(self.parcels.tables, 0)
        self.plain = []
        for row, count in enumerate(parcels):
            self.parcels.seat(row, count, 0)
            capacity = count * parcel_slots
            self.plain.append(PlainLane([*range(1, capacity), 0], {0: 0}))
        self.check()

    def grow(self, row: int, count: int) -> None:
        self.parcels.grow(row, count)
        self.plain[row].grow(count * self.tables.parcel_slots)
        self.check()

    def shrink(self, row: int, count: int) -> None:
        """The definition says which blocks stay and in what sequence; their slots' numbers are free."""
        plain = self.plain[row]
        held = dict(plain.block_of)
        before = places_of(self.tables, row)
        moves = self.parcels.shrink(row, count)
        plain.shrink(count * self.tables.parcel_slots)
        order = order_of(self.tables, row)
        places = places_of(self.tables, row)
        blocks = [int(self.tables.slot_to_block[places[slot]]) for slot in order]
        assert blocks == [-1 if block is None else block for block in plain.blocks()]
        pairs = zip(moves.source.flatten().tolist(), moves.target.flatten().tolist(), strict=True)
        moved = {source: target for source, target in pairs if source != target}
        for slot, block in held.items():  # the bytes of each that stays are where its new slot is
            if block in plain.block_of.values():
                was, is_at = int(before[slot]), int(places[int(self.tables.block_to_slot[row, block])])
                assert moved.get(was, was) == is_at
        plain.renumber(order)
        self.check()

    def step(self, lanes: list[int], selections: list[list[int]], opened: list[int]) -> None:
        """One step on both sides; everything must agree."""
        result = assign(
            self.tables,
            torch.tensor(lanes, dtype=torch.int64),
            torch.tensor(selections, dtype=torch.int32).view(len(lanes), -1),
            torch.tensor(opened, dtype=torch.int64),
        )
        expected = [
            self.plain[lane].step(sel, op) for lane, sel, op in zip(lanes, selections, opened, strict=True)
        ]
        for i, (lane, (slots, open_slot, fetches, _, _)) in enumerate(zip(lanes, expected, strict=True)):
            pool = places_of(self.tables, lane)
            assert result.slots[i].tolist() == [-1 if s < 0 else int(pool[s]) for s in slots]
            assert int(result.open_slot[i]) == int(pool[open_slot])
            mine = result.miss_lane == i
            got = list(zip(result.miss_block[mine].tolist(), result.miss_slot[mine].tolist(), strict=True))
            assert got == [(block, int(pool[slot])) for block, slot in fetches]
        assert result.hits == sum(e[3] for e in expected)
        assert result.evictions == sum(e[4] for e in expected)
        self.check()

    def check(self) -> None:
        """Every table says the same as the oracle, and as each other."""
        for lane, plain in enumerate(self.plain):
            assert order_of(self.tables, lane) == plain.order
            blocks = self.tables.slot_to_block[places_of(self.tables, lane)].tolist()
            held = {s: b for s, b in enumerate(blocks) if b >= 0}
            assert held == plain.block_of
            back = {b: s for b, s in enumerate(self.tables.block_to_slot[lane].tolist()) if s >= 0}
            assert back == {b: s for s, b in held.items()}
        everywhere = torch.cat([places_of(self.tables, lane) for lane in range(len(self.plain))]).tolist()
        assert len(set(everywhere)) == len(everywhere), "a slot is owned twice"


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, int, list[int], list[tuple[str, int]], int]:
    top_k = draw(st.integers(1, 6))
    size = draw(st.sampled_from([1, 2, 4]))
    floor = -(-(top_k + 1) // size)
    parcels = draw(st.lists(st.integers(floor, floor + 8 // size), min_size=1, max_size=4))
    actions = st.tuples(st.sampled_from(["step"] * 6 + ["grow", "shrink", "leave"]), st.integers(0, 2**20))
    return top_k, size, parcels, draw(st.lists(actions, min_size=1, max_size=25)), draw(st.integers(0, 2**20))


@settings(max_examples=150, deadline=None)
@given(scripts())
def test_any_history_equals_the_plain_lru(
    script: tuple[int, int, list[int], list[tuple[str, int]], int],
) -> None:
    top_k, size, parcels, actions, seed = script
    floor = -(-(top_k + 1) // size)
    most = floor + 12 // size
    rig = Rig(parcels, max_blocks=40, most=most, parcel_slots=size, seed=seed)
    newest = [0] * len(parcels)
    for action, salt in actions:
        chance = random.Random(salt)
        lane = chance.randrange(len(parcels))
        owned = len(rig.parcels.held[lane])
        if action == "step":
            lanes = [i for i in range(len(parcels)) if chance.random() < 0.7]
            for i in lanes:
                newest[i] = min(39, newest[i] + (chance.random() < 0.5))
            picks = [[chance.randint(-1, newest[i]) for _ in range(top_k)] for i in lanes]
            if lanes:
                rig.step(lanes, picks, [newest[i] for i in lanes])
        elif action == "grow" and owned < most:
            rig.grow(lane, chance.randint(1, most - owned))
        elif action == "shrink" and owned > floor:
            rig.shrink(lane, chance.randint(1, owned - floor))
        elif action == "leave":
            rig.parcels.leave(lane)
            rig.parcels.seat(lane, owned, newest[lane])
            rig.plain[lane] = PlainLane([*range(1, owned * size), 0], {0: newest[lane]})
            rig.check()


CASES = {
    "nothing selected": (3, 4, [([-1, -1, -1], 0), ([-1, -1, -1], 5)]),
    "duplicates share a slot": (4, 5, [([7, 7, 2, 7], 9), ([2, 2, 2, 2], 9)]),
    "top_k past length": (4, 5, [([0, -1, -1, -1], 0), ([0, 1, -1, -1], 1)]),
    "exactly full": (3, 4, [([0, 1, 2], 3), ([0, 1, 2], 3), ([2, 1, 0], 3)]),
    "one past full": (3, 4, [([0, 1, 2], 3), ([0, 1, 2], 4), ([3, 1, 2], 4)]),
    "all miss, then all hit": (3, 4, [([0, 1, 2], 9), ([3, 4, 5], 9), ([3, 4, 5], 9)]),
    "open block chosen before it has a slot": (3, 4, [([8, 5, 6], 8), ([5, 8, 6], 8)]),
    "open block chosen in the middle, new each step": (
        3,
        4,
        [([5, 8, 6], 8), ([5, 9, 6], 9), ([6, 10, 5], 10)],
    ),
    "resident lane leaves its order alone": (2, 6, [([0, -1], 0), ([0, 1], 1), ([1, 0], 1), ([0, 1], 1)]),
    "a slot for every block, and some not here yet": (
        2,
        6,
        [([3, 1], 5), ([1, 3], 5), ([4, 1], 5), ([3, 4], 5)],
    ),
    "one slot too few for that": (2, 5, [([3, 1], 5), ([1, 3], 5), ([4, 1], 5), ([3, 4], 5)]),
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    _, capacity, steps = CASES[name]
    rig = Rig([capacity], max_blocks=16, most=capacity + 2)
    for selection, opened in steps:
        rig.step([0], [selection], [opened])


def test_lanes_left_out_of_a_step_are_untouched() -> None:
    rig = Rig([4, 4, 4], max_blocks=16, most=6)
    rig.step([0, 1, 2], [[1, 2, 3]] * 3, [5, 6, 7])
    own = places_of(rig.tables, 1)
    tables = (rig.tables.order, rig.tables.slot_to_block)
    before = [*(table[own] for table in tables), rig.tables.block_to_slot[1].clone()]
    rig.step([2, 0], [[8, 9, 1], [4, 1, 2]], [9, 5])
    after = [*(table[own] for table in tables), rig.tables.block_to_slot[1]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_shrinking_loses_the_stalest_whatever_slots_they_have() -> None:
    rig = Rig([2], max_blocks=16, most=2, parcel_slots=4)
    rig.step([0], [[1, 2, 3]], [9])
    rig.step([0], [[4, 5, 6]], [9])
    rig.step([0], [[2, 1, -1]], [9])  # stale to recent: 3 4 5 6 1 2 9, behind block 0
    rig.shrink(0, 1)
    assert [rig.plain[0].block_of[slot] for slot in rig.plain[0].order] == [6, 1, 2, 9]
    rig.grow(0, 1)
    rig.step([0], [[3, 7, 8]], [9])
    assert sorted(rig.plain[0].block_of.values()) == [1, 2, 3, 6, 7, 8, 9]


def test_resolve_moves_exactly_the_missing_bytes() -> None:
    """After resolve each returned slot holds its block's bytes, and nothing else of the pool changed."""
    chance = random.Random(5)
    rig = Rig([3, 3, 3], max_blocks=64, most=3, parcel_slots=2)
    arena = torch.randint(0, 2**31, (300, 8), dtype=torch.int32)
    home = torch.randperm(300)[: 3 * 64].view(3, 64)
    pool = torch.zeros(18, 8, dtype=torch.int32)
    counters = torch.zeros(len(Counter), dtype=torch.int64)
    params = LayerStore(rig.tables, pool, arena, counters)
    for step in range(200):
        opened = torch.tensor([step // 4, step // 5, step // 6])
        selected = torch.tensor(
            [[chance.randint(-1, int(o)) for _ in range(4)] for o in opened], dtype=torch.int32
        )
        old = pool.clone()
        result = resolve(params, torch.arange(3), selected, opened, home)
        for lane in range(3):
            for block, slot in zip(selected[lane].tolist(), result.slots[lane].tolist(), strict=True):
                if block >= 0 and block != int(opened[lane]):
                    assert torch.equal(pool[slot], arena[home[lane, block]])
            pool[result.open_slot[lane]] = arena[home[lane, opened[lane]]]
        untouched = torch.ones(pool.shape[0], dtype=torch.bool)
        untouched[result.miss_slot] = False
        untouched[result.open_slot.long()] = False
        assert torch.equal(pool[untouched], old[untouched])
    chosen, hits, misses, evictions, fetched = counters[:5].tolist()
    assert chosen == hits + misses
    assert fetched == misses * 8 * 4
    assert 0 < evictions <= misses + 3 * 200
    assert misses > 100
