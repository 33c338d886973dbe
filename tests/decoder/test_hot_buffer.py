"""The hot buffer's seats: nothing is lost or owned twice, and the check would notice if it were."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from services.decoder.kernels.lanes import capacity_of
from services.decoder.kernels.lru import assign
from services.decoder.kv.hot_buffer import HotBuffer
from tests.decoder import made_up

ROWS, MAX_BLOCKS, CAPACITIES = 3, 15, (15, 5)


def make() -> HotBuffer:
    return HotBuffer(made_up.shape(), ROWS, MAX_BLOCKS, CAPACITIES, made_up.CPU)


def use(hot: HotBuffer, row: int, blocks: list[int], opened: int) -> None:
    """Let all lanes of a row choose some blocks in every layer."""
    groups = hot.shape.groups
    lanes = torch.arange(row * groups, (row + 1) * groups)
    for tables in hot.tables:
        chosen = torch.tensor([blocks] * groups, dtype=torch.int32)
        assign(tables, lanes, chosen, torch.full((groups,), opened))


def test_seats_come_and_go() -> None:
    hot = make()
    assert (hot.slots_total, hot.slots_used) == (ROWS * 3 * sum(CAPACITIES), 0)
    for row in (1, 0, 2):
        hot.seat(row, 2)
        hot.check_integrity()
        for tables, capacity in zip(hot.tables, CAPACITIES, strict=True):
            assert [capacity_of(tables, lane) for lane in range(row * 3, row * 3 + 3)] == [capacity] * 3
    assert hot.slots_used == hot.slots_total
    use(hot, 0, [1, 2, 3], 9)
    hot.check_integrity()
    hot.leave(0)
    hot.check_integrity()
    assert hot.slots_used == hot.slots_total * 2 // 3
    hot.leave(0)
    assert hot.slots_used == hot.slots_total * 2 // 3, "a row that left has nothing more to give"
    hot.seat(0, 2)
    for tables in hot.tables:
        assert (tables.block_to_slot[:3, 2] == 0).all()
        tables.block_to_slot[:3, 2] = -1
        assert (tables.block_to_slot[:3] == -1).all(), "a new row sees blocks of the one before it"


def test_any_history_of_seats_keeps_the_books() -> None:
    hot, chance, seated = make(), random.Random(2), set[int]()
    for _ in range(120):
        row = chance.randrange(ROWS)
        if row not in seated:
            hot.seat(row, 2)
            seated.add(row)
        elif chance.random() < 0.3:
            hot.leave(row)
            seated.remove(row)
        elif chance.random() < 0.4:
            hot.resize(1, row * 3 + chance.randrange(3), chance.randint(4, 5))
        else:
            use(hot, row, chance.sample(range(12), 3), chance.randrange(12))
        hot.check_integrity()


def test_resizing_moves_slots_between_lanes() -> None:
    hot = make()
    for row in range(ROWS):
        hot.seat(row, 2)
    with pytest.raises(ValueError, match="layer 1 has 0 free hot slots, 1 are needed"):
        hot.resize(1, 0, 6)
    hot.resize(1, 4, 3)
    with pytest.raises(ValueError, match="exceed the table's 5"):
        hot.resize(1, 0, 6)
    hot.resize(1, 0, 2)
    hot.resize(1, 0, 5)
    assert hot.slots_used == hot.slots_total - 2
    hot.check_integrity()


def lose_a_slot(hot: HotBuffer) -> None:
    hot.tables[1].pool_slot[0, 0] = -1


def own_a_slot_twice(hot: HotBuffer) -> None:
    hot.tables[1].pool_slot[0, 0] = hot.tables[1].pool_slot[1, 0]


def forget_a_block(hot: HotBuffer) -> None:
    hot.tables[0].block_to_slot[0, 3] = -1


def invent_a_block(hot: HotBuffer) -> None:
    hot.tables[0].block_to_slot[2, 14] = 0


def miscount(hot: HotBuffer) -> None:
    hot.tables[1].resident[3] += 1


def repeat_a_slot_in_the_order(hot: HotBuffer) -> None:
    hot.tables[1].order[0, 0] = hot.tables[1].order[0, 1]


def drop_a_slot_from_the_order(hot: HotBuffer) -> None:
    hot.tables[1].order[0, 4] = -1


FAULTS: tuple[Callable[[HotBuffer], None], ...] = (
    lose_a_slot,
    own_a_slot_twice,
    forget_a_block,
    invent_a_block,
    miscount,
    repeat_a_slot_in_the_order,
    drop_a_slot_from_the_order,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_notices(fault: Callable[[HotBuffer], None]) -> None:
    hot = make()
    hot.seat(0, 2)
    hot.seat(1, 2)
    use(hot, 0, [1, 2, 3], 9)
    use(hot, 1, [1, 2, 3], 9)
    hot.check_integrity()
    fault(hot)
    with pytest.raises(AssertionError):
        hot.check_integrity()
