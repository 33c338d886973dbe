"""Eviction policies against plain ones that look at everything; Belady against all there is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.eviction import POLICIES, Chance, Make, Stream, lrfu, misses
from benchmarks.policies import PAPER, of_synthetic, of_trace, policies
from benchmarks.selection_stream import Lane, synthetic
from tests.decoder.plain_lru import PlainLane


def stream_of(chosen: list[list[int]], opened: list[int]) -> Stream:
    arrays = tuple(np.array(each, np.int32) for each in chosen)
    return Stream(arrays, np.array(opened, np.int32), 1 + max(opened + [b for each in chosen for b in each]))


@st.composite
def streams(draw: st.DrawFn, longest: int = 30, blocks: int = 14, most: int = 4) -> Stream:
    """Any choices of at most `most` blocks; the open block moves on now and then and may be left out."""
    steps = draw(st.integers(1, longest))
    chosen = [draw(st.lists(st.integers(0, blocks - 1), max_size=most, unique=True)) for _ in range(steps)]
    opened = [blocks - 3 + step * 3 // steps for step in range(steps)]
    return stream_of(chosen, opened)


Worth = Callable[[Stream, int, int], object]  # of (stream, step, block): who is evicted has the least


def last_chosen(stream: Stream, step: int, block: int) -> int:
    return max((at for at in range(step) if block in stream.chosen[at]), default=-1)


def soon(stream: Stream, step: int, block: int) -> int:
    after = (at for at in range(step + 1, len(stream.chosen)) if block in stream.chosen[at])
    return -next(after, 10**6)


def decayed(half_life: int) -> Worth:
    def worth(stream: Stream, step: int, block: int) -> float:
        """Exact where the half-life is 1; elsewhere no two counts of these short streams come close."""
        count = sum(
            (Fraction(2.0 ** (-(step - at) / half_life)) for at in range(step) if block in stream.chosen[at]),
            Fraction(0),
        )
        return float(count)

    return worth


def plain(stream: Stream, capacity: int, worth: Worth) -> list[int]:
    """Misses by step; of equals, the one that was chosen or open longest ago goes."""
    held: list[int] = []
    counts = []
    for step, (found, open_block) in enumerate(zip(stream.chosen, stream.opened.tolist(), strict=True)):
        chosen = found.tolist()
        counts.append(sum(block not in held and block != open_block for block in chosen))
        must = chosen if open_block in chosen else [*chosen, open_block]
        others = [block for block in held if block not in must]
        while len(others) + len(must) > capacity:
            others.remove(min(others, key=lambda block: worth(stream, step, block)))  # type: ignore[arg-type,return-value]  # any order will do
        held = others + must
    return counts


def plain_lru(stream: Stream, capacity: int) -> list[int]:
    lane = PlainLane(list(range(capacity)))
    steps = zip(stream.chosen, stream.opened.tolist(), strict=True)
    return [len(lane.step(chosen.tolist(), opened)[2]) for chosen, opened in steps]


@settings(deadline=None, max_examples=60)
@given(streams(), st.integers(5, 9))
def test_lru_is_the_hot_buffers(stream: Stream, capacity: int) -> None:
    assert misses(stream, POLICIES["lru"], capacity).tolist() == plain_lru(stream, capacity)


PLAIN: Mapping[str, tuple[Make, Worth]] = {
    "lrfu 1": (lrfu(1), decayed(1)),
    "lrfu 3": (lrfu(3), decayed(3)),
    "belady": (POLICIES["belady"], soon),
}


@pytest.mark.parametrize("name", PLAIN)
@settings(deadline=None, max_examples=40)
@given(stream=streams(), capacity=st.integers(5, 9))
def test_policies_are_the_plain_ones(name: str, stream: Stream, capacity: int) -> None:
    make, worth = PLAIN[name]
    assert misses(stream, make, capacity).tolist() == plain(stream, capacity, worth)


@settings(deadline=None, max_examples=40)
@given(stream=streams(), capacity=st.integers(5, 9))
def test_fifo_is_a_queue(stream: Stream, capacity: int) -> None:
    queue: list[int] = []
    counts = []
    for found, open_block in zip(stream.chosen, stream.opened.tolist(), strict=True):
        chosen = found.tolist()
        came = [block for block in chosen if block not in queue and block != open_block]
        new = came if open_block in queue else [*came, open_block]
        counts.append(len(came))
        while len(queue) + len(new) > capacity:
            queue.remove(next(block for block in queue if block not in (*chosen, open_block)))
        queue += new
    assert misses(stream, POLICIES["fifo"], capacity).tolist() == counts


@settings(deadline=None, max_examples=100)
@given(stream=streams(), capacity=st.integers(5, 9))
def test_belady_misses_no_more_than_any_other(stream: Stream, capacity: int) -> None:
    best = misses(stream, POLICIES["belady"], capacity).sum()
    for name, make in policies([1, 4, 100]).items():
        assert best <= misses(stream, make, capacity).sum(), name


@settings(deadline=None, max_examples=40)
@given(stream=streams(longest=6, blocks=8, most=2), capacity=st.integers(3, 4))
def test_belady_is_the_best_there_is(stream: Stream, capacity: int) -> None:
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for found, open_block in zip(stream.chosen, stream.opened.tolist(), strict=True):
        chosen, after = set(found.tolist()), dict[frozenset[int], int]()
        for held, cost in reached.items():
            total = cost + len(chosen - held - {open_block})
            must = chosen | {open_block}
            others = sorted(held - must)
            for kept in itertools.combinations(others, min(len(others), capacity - len(must))):
                now = must | set(kept)
                after[frozenset(now)] = min(total, after.get(frozenset(now), total))
        reached = after
    assert misses(stream, POLICIES["belady"], capacity).sum() == min(reached.values())


def test_random_evicts_whom_it_may_and_the_same_ones_again() -> None:
    stream = synthetic(500, 60, 32)
    first, again = (misses(stream, Chance, 64) for _ in range(2))
    assert first.tolist() == again.tolist()
    assert (
        misses(stream, POLICIES["belady"], 64).sum()
        < first.sum()
        < misses(stream, POLICIES["fifo"], 33).sum()
    )


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="step 1 needs 4 blocks at once; a capacity of 3"):
        misses(stream_of([[0, 1], [0, 1, 2]], [5, 5]), POLICIES["lru"], 3)


def test_room_for_all_misses_each_block_once() -> None:
    stream = stream_of([[0, 1], [2, 0], [1, 9], [2, 9]], [9, 9, 9, 9])
    for make in policies([8]).values():
        assert misses(stream, make, 10).tolist() == [2, 1, 0, 0]


def test_a_small_synthetic_stream_orders_policies_as_the_paper_does() -> None:
    stream = synthetic(6_000, 150, 128)
    assert all(len(set(each.tolist())) == 128 for each in stream.chosen)
    assert all(
        {0, 1, 2, 3, int(newest)} <= set(each.tolist())
        for each, newest in zip(stream.chosen, stream.opened, strict=True)
    )
    rates = {row.policy: row.miss_percent for row in of_synthetic(stream, [256], policies([]))}
    assert rates["belady"] < rates["lru"] < rates["random"] < rates["fifo"]


@pytest.mark.slow
def test_the_synthetic_stream_reproduces_the_papers_table() -> None:
    stream = synthetic()
    for (policy, capacity), theirs in PAPER.items():
        [row] = of_synthetic(stream, [capacity], {policy: POLICIES[policy]})
        assert abs(row.miss_percent - theirs) < 1, (policy, capacity, row.miss_percent)


def test_rows_of_a_trace_sum_over_layers_and_groups() -> None:
    """Behind one step of warm-up: of 4 choices 1 misses in layer 0, of 4 two in layer 1."""
    few, many = stream_of([[0, 1], [0, 2], [0, 1]], [8] * 3), stream_of([[0, 1], [2, 3], [2, 3]], [8] * 3)
    lanes = [(Lane(0, 8, 0, 0), few), (Lane(0, 8, 1, 0), many), (Lane(1, 2, 0, 0), stream_of([[0]], [2]))]
    rows = of_trace("t", lanes, [4], {"lru": POLICIES["lru"]}, 1)
    assert {row.layer: row.miss_percent for row in rows} == {0: 25.0, 1: 50.0, None: 37.5}
    assert {row.context for row in rows} == {8}, "a sequence that is all warm-up says nothing"
