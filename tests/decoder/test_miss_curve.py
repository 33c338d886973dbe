"""The sampled miss-ratio curve against LRUs that are simulated, one for each size."""

from __future__ import annotations

import random

import numpy as np
import pytest

from services.decoder.kv.miss_curve import CAPACITIES, LaneChoice, MissCurve
from tests.decoder.plain_lru import PlainLane

TOP_K = 12


def _choices(steps: int, blocks: int, *, loop: bool, seed: int = 0) -> list[tuple[list[int], int]]:
    """A selection and an open block a step: drifting favourites, or every block in turn."""
    random_ = random.Random(seed)
    taken = []
    favourites = random_.sample(range(blocks), TOP_K)
    for step in range(steps):
        opened = blocks + step // 8
        if loop:
            picked = [(step * TOP_K + place) % blocks for place in range(TOP_K - 1)]
        else:
            for _ in range(3):
                favourites[random_.randrange(TOP_K)] = int(blocks * random_.random() ** 3)
            picked = favourites[: TOP_K - 1]
        taken.append(([*picked, opened, -1, picked[0]], opened))
    return taken


def _simulated(choices: list[tuple[list[int], int]], capacity: int) -> tuple[int, int]:
    """Blocks chosen and missed by a lane of resolve's definition."""
    opened = choices[0][1]
    lane = PlainLane([*range(1, capacity), 0], {0: opened})
    chosen = misses = 0
    for selection, open_block in choices:
        fetches, hits = lane.step(selection, open_block)[2:4]
        chosen += hits + len(fetches)
        misses += len(fetches)
    return chosen, misses


def _curve(choices: list[tuple[list[int], int]], capacity: int, rows: int = 1) -> MissCurve:
    curve = MissCurve([5])
    for selection, opened in choices:
        step = [LaneChoice(row, capacity, opened, np.array(selection, np.int32)) for row in range(rows)]
        curve.note(5, step)
    return curve


@pytest.mark.parametrize(
    ("capacity", "loop"), [(26, False), (30, False), (77, False), (77, True), (100, True)]
)
def test_every_size_is_as_if_simulated(capacity: int, loop: bool) -> None:
    choices = _choices(400, 200, loop=loop)
    curve = _curve(choices, capacity)
    for size, misses in zip(CAPACITIES, curve.misses, strict=True):
        chosen, simulated = _simulated(choices, int(capacity * size))
        assert curve.chosen == chosen
        # Only blocks of one and the same step may stand in another order.
        assert abs(misses - simulated) <= 0.002 * chosen, (size, misses, simulated)
    assert curve.misses == sorted(curve.misses, reverse=True)
    assert curve.misses[0] > curve.misses[-1], "the choices tell sizes apart"


def test_a_buffer_for_everything_misses_what_it_never_had() -> None:
    choices = _choices(100, 40, loop=False)
    seen = {block for selection, _ in choices for block in selection if 0 <= block < 40}
    assert _curve(choices, 4 * 60).misses == [len(seen)] * len(CAPACITIES)


def test_rows_are_counted_apart_and_forgotten() -> None:
    choices = _choices(50, 60, loop=False)
    one, two = _curve(choices, 30), _curve(choices, 30, rows=2)
    assert two.chosen == 2 * one.chosen
    assert two.misses == [2 * misses for misses in one.misses]
    again = [LaneChoice(0, 30, choices[-1][1], np.array(choices[-1][0], np.int32))]
    two.note(5, again)
    assert two.misses == [2 * misses for misses in one.misses], "the last choice, chosen again"
    two.leave(0)
    two.note(5, again)
    cold = len({*choices[-1][0]} - {-1, choices[-1][1]})
    assert two.misses == [2 * misses + cold for misses in one.misses], "nothing is known of a new row"


def test_a_lane_that_chooses_nothing_is_no_choice() -> None:
    curve = MissCurve([0])
    curve.note(0, [LaneChoice(0, 17, 3000, np.full(8, -1, np.int32))])
    assert (curve.chosen, sum(curve.misses)) == (0, 0)


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_half_of_a_slot_holds_nothing_but_the_open_block(capacity: int) -> None:
    """A row of one block owns one slot."""
    curve = MissCurve([0])
    for block in (0, 1, 0, 1, 1):
        curve.note(0, [LaneChoice(0, capacity, 1, np.array([block, 1, -1], np.int32))])
    assert curve.chosen == 7, "two blocks where the other one was chosen"
    assert curve.misses == [2, 2 if capacity == 1 else 1, 1, 1]
