"""The resolve twin against a plain-Python LRU: slots, order, fetches, counters and bytes, step by step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.kernels.counter import Counter
from services.decoder.kernels.lanes import capacity_of, empty_tables, grow, shrink
from services.decoder.kernels.lru import LaneTables, assign
from services.decoder.kernels.resolve import resolve
from services.decoder.kernels.step_kernels import LayerStore
from tests.decoder.plain_lru import PlainLane

CPU = torch.device("cpu")


@dataclass
class Rig:
    """Some lanes of one layer, seated in scattered pool slots, and their oracles."""

    tables: LaneTables
    plain: list[PlainLane]
    free: list[int]

    @classmethod
    def make(cls, capacities: list[int], max_blocks: int, width: int, seed: int = 0) -> Rig:
        tables = empty_tables(len(capacities), max_blocks, width, CPU)
        free = list(range(width * len(capacities) + 5))
        random.Random(seed).shuffle(free)
        for lane, capacity in enumerate(capacities):
            grow(tables, lane, [free.pop() for _ in range(capacity)])
        return cls(tables, [PlainLane(list(range(c))) for c in capacities], free)

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
        pool = self.tables.pool_slot
        for i, (lane, (slots, open_slot, fetches, _, _)) in enumerate(zip(lanes, expected, strict=True)):
            assert result.slots[i].tolist() == [-1 if s < 0 else int(pool[lane, s]) for s in slots]
            assert int(result.open_slot[i]) == int(pool[lane, open_slot])
            mine = result.miss_lane == i
            got = list(zip(result.miss_block[mine].tolist(), result.miss_slot[mine].tolist(), strict=True))
            assert got == [(block, int(pool[lane, slot])) for block, slot in fetches]
        assert result.hits == sum(e[3] for e in expected)
        assert result.evictions == sum(e[4] for e in expected)
        self.check()

    def check(self) -> None:
        """Every table says the same as the oracle, and as each other."""
        for lane, plain in enumerate(self.plain):
            owned = len(plain.order)
            assert self.tables.order[lane, :owned].tolist() == plain.order
            assert (self.tables.order[lane, owned:] == -1).all()
            assert int(self.tables.resident[lane]) == len(plain.block_of)
            held = {s: b for s, b in enumerate(self.tables.slot_to_block[lane].tolist()) if b >= 0}
            assert held == plain.block_of
            back = {b: s for b, s in enumerate(self.tables.block_to_slot[lane].tolist()) if s >= 0}
            assert back == {b: s for s, b in held.items()}
        owned_slots = self.tables.pool_slot[self.tables.pool_slot >= 0].tolist()
        assert len(set(owned_slots) | set(self.free)) == len(owned_slots) + len(self.free)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, list[int], list[tuple[str, int]], int]:
    top_k = draw(st.integers(1, 6))
    capacities = draw(st.lists(st.integers(top_k + 1, top_k + 8), min_size=1, max_size=4))
    actions = st.tuples(st.sampled_from(["step"] * 6 + ["grow", "shrink", "leave"]), st.integers(0, 2**20))
    return top_k, capacities, draw(st.lists(actions, min_size=1, max_size=25)), draw(st.integers(0, 2**20))


@settings(max_examples=150, deadline=None)
@given(scripts())
def test_any_history_equals_the_plain_lru(script: tuple[int, list[int], list[tuple[str, int]], int]) -> None:
    top_k, capacities, actions, seed = script
    rig = Rig.make(capacities, max_blocks=40, width=top_k + 12, seed=seed)
    newest = [0] * len(capacities)
    for action, salt in actions:
        chance = random.Random(salt)
        lane = chance.randrange(len(capacities))
        if action == "step":
            lanes = [i for i in range(len(capacities)) if chance.random() < 0.7]
            for i in lanes:
                newest[i] = min(39, newest[i] + (chance.random() < 0.5))
            picks = [[chance.randint(-1, newest[i]) for _ in range(top_k)] for i in lanes]
            if lanes:
                rig.step(lanes, picks, [newest[i] for i in lanes])
        elif action == "grow":
            room = rig.tables.order.shape[1] - capacity_of(rig.tables, lane)
            extra = chance.randint(0, room)
            unowned = [s for s in range(rig.tables.order.shape[1]) if s not in rig.plain[lane].order][:extra]
            grow(rig.tables, lane, [rig.free.pop() for _ in range(extra)])
            rig.plain[lane].grow(unowned)
        elif action == "shrink":
            spare = capacity_of(rig.tables, lane) - (top_k + 1)
            count = chance.randint(0, spare)
            rig.free += shrink(rig.tables, lane, count)
            rig.plain[lane].shrink(count)
        else:
            capacity = capacity_of(rig.tables, lane)
            rig.free += shrink(rig.tables, lane, capacity_of(rig.tables, lane))
            grow(rig.tables, lane, [rig.free.pop() for _ in range(capacity)])
            rig.plain[lane] = PlainLane(list(range(capacity)))
            newest[lane] = 0
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
}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    _, capacity, steps = CASES[name]
    rig = Rig.make([capacity], max_blocks=16, width=capacity + 2)
    for selection, opened in steps:
        rig.step([0], [selection], [opened])


def test_lanes_left_out_of_a_step_are_untouched() -> None:
    rig = Rig.make([4, 4, 4], max_blocks=16, width=6)
    rig.step([0, 1, 2], [[1, 2, 3]] * 3, [5, 6, 7])
    before = [t[1].clone() for t in (rig.tables.order, rig.tables.block_to_slot, rig.tables.slot_to_block)]
    rig.step([2, 0], [[8, 9, 1], [4, 1, 2]], [9, 5])
    after = (rig.tables.order[1], rig.tables.block_to_slot[1], rig.tables.slot_to_block[1])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_resizing_beyond_the_table_or_below_nothing_is_refused() -> None:
    rig = Rig.make([4], max_blocks=16, width=6)
    with pytest.raises(ValueError, match="exceed the table"):
        grow(rig.tables, 0, [100, 101, 102])
    with pytest.raises(ValueError, match="cannot give up 5"):
        shrink(rig.tables, 0, 5)
    rig.check()


def test_resolve_moves_exactly_the_missing_bytes() -> None:
    """After resolve each returned slot holds its block's bytes, and nothing else of the pool changed."""
    chance = random.Random(5)
    rig = Rig.make([6, 6, 6], max_blocks=64, width=6)
    arena = torch.randint(0, 2**31, (300, 8), dtype=torch.int32)
    home = torch.randperm(300)[: 3 * 64].view(3, 64)
    pool = torch.zeros(len(rig.free) + 18, 8, dtype=torch.int32)
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
