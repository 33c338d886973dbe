"""The hot buffer's seats: nothing is lost or owned twice, and the check would notice if it were."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from services.decoder.kernels.lru import assign
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.hot_class import HotClass, Resize
from tests.decoder import made_up

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, MAX_BLOCKS = 3, 15
CLASSES = (
    HotClass(layers=1, parcels=12, parcel_slots=4, floor=4, most=4),
    HotClass(layers=2, parcels=9, parcel_slots=2, floor=2, most=6),
)
FIRST = ([7, 2], [11, 0], [5, 6])  # parcels of the second class that rows are seated with


def make() -> HotBuffer:
    return HotBuffer(made_up.shape(), ROWS, MAX_BLOCKS, CLASSES, made_up.CPU)


def seat(hot: HotBuffer, row: int, parcels: list[int], opened: int = 2) -> None:
    hot.resize([Resize(0, row, list(range(row * 4, row * 4 + 4))), Resize(1, row, parcels)])
    hot.seat(row, opened)


def use(hot: HotBuffer, row: int, blocks: list[int], opened: int) -> None:
    """Let all lanes of a row choose some blocks in every layer."""
    groups = hot.shape.groups
    lanes = torch.arange(row * groups, (row + 1) * groups)
    for layer, tables in enumerate(hot.tables):
        chosen = torch.tensor([blocks] * groups, dtype=torch.int32)
        found = assign(tables, lanes, chosen, torch.full((groups,), opened))
        # Each block's bytes tell which it is, of which lane.
        for group in range(groups):
            for block, slot in zip(blocks, found.slots[group].tolist(), strict=True):
                hot.pools[layer][slot] = mark(row, group, block)
            hot.pools[layer][found.open_slot[group]] = mark(row, group, opened)


def mark(row: int, group: int, block: int) -> float:
    return float(row * 1000 + group * 100 + block)


def check_bytes(hot: HotBuffer, row: int) -> set[int]:
    """Every slot of a used row holds its block's bytes; returns the blocks of its lanes in the last layer."""
    groups, found = hot.shape.groups, set()
    for layer, tables in enumerate(hot.tables):
        for group in range(groups):
            lane = torch.tensor([row * groups + group])
            known = tables.block_to_slot[lane[0]]
            for block in (known >= 0).nonzero().flatten().tolist():
                place = int(tables.places(lane, int(tables.capacity[row]))[0, known[block]])
                assert (hot.pools[layer][place] == mark(row, group, block)).all()
                if layer == 2:
                    found.add(block)
    return found


def test_seats_come_and_go() -> None:
    hot = make()
    assert (hot.slots_total, hot.slots_used) == (3 * (48 + 2 * 18), 0)
    for row, parcels in enumerate(([7, 2], [1, 0, 3], [5, 6])):
        seat(hot, row, parcels)
        hot.check_integrity()
        assert [int(tables.capacity[row]) for tables in hot.tables] == [
            16,
            2 * len(parcels),
            2 * len(parcels),
        ]
    assert hot.slots_used == 3 * (48 + 2 * 14)
    use(hot, 0, [1, 4, 3], 9)
    hot.check_integrity()
    hot.leave(0)
    hot.check_integrity()
    assert hot.slots_used == 3 * (32 + 2 * 10)
    hot.leave(0)
    assert hot.slots_used == 3 * (32 + 2 * 10), "a row that left has nothing more to give"
    seat(hot, 0, [2, 7])
    for tables in hot.tables:
        assert (tables.block_to_slot[:3, 2] == 0).all()
        tables.block_to_slot[:3, 2] = -1
        assert (tables.block_to_slot[:3] == -1).all(), "a new row sees blocks of the one before it"


def test_any_history_of_seats_keeps_the_books() -> None:
    hot, chance = make(), random.Random(2)
    free, held = list(range(9)), dict[int, list[int]]()
    shrunk = 0
    for _ in range(250):
        row, draw = chance.randrange(ROWS), chance.random()
        if row not in held:
            if len(free) < 2:
                continue
            held[row] = [free.pop(), free.pop()]
            seat(hot, row, held[row])
            use(hot, row, [2], 2)
        elif draw < 0.1:
            hot.leave(row)
            free += held.pop(row)
        elif draw < 0.25 and free and len(held[row]) < 6:
            held[row] = [*held[row], free.pop(chance.randrange(len(free)))]
            hot.resize([Resize(1, row, held[row])])
        elif draw < 0.4 and len(held[row]) > 2:
            count = chance.randint(2, len(held[row]) - 1)
            free += held[row][count:]
            held[row] = held[row][:count]
            hot.resize([Resize(1, row, held[row])])
            shrunk += 1
        else:
            use(hot, row, chance.sample(range(12), 3), chance.randrange(12))
        hot.check_integrity()
        for seated in held:
            check_bytes(hot, seated)
    assert shrunk > 10


def test_a_row_that_shrinks_keeps_its_most_recent_blocks_and_their_bytes() -> None:
    hot = make()
    seat(hot, 0, [7, 2, 1, 0, 3, 5])
    use(hot, 0, [2], 2)
    for blocks in ([0, 1, 3], [4, 5, 6], [7, 8, 1], [0, 4, 9]):
        use(hot, 0, blocks, 10)
    assert check_bytes(hot, 0) == set(range(11))
    hot.resize([Resize(1, 0, [7, 2, 1])])
    hot.check_integrity()
    assert check_bytes(hot, 0) == {8, 1, 9, 0, 4, 10}  # stale to recent: 9 missed, 0 and 4 were hits
    hot.resize([Resize(1, 0, [7, 2])])
    assert check_bytes(hot, 0) == {9, 0, 4, 10}
    assert hot.slots_used == 3 * (16 + 2 * 4)
    hot.resize([Resize(1, 0, [7, 2, 8])])
    hot.check_integrity()
    use(hot, 0, [1, 2, 3], 10)  # two new slots, and the stalest block's
    assert check_bytes(hot, 0) == {0, 4, 1, 2, 3, 10}


def owned(hot: HotBuffer, row: int) -> list[torch.Tensor]:
    """All that is a row's own, in every layer."""
    found = []
    lanes = torch.arange(row * hot.shape.groups, (row + 1) * hot.shape.groups)
    for pool, tables in zip(hot.pools, hot.tables, strict=True):
        places = tables.places(lanes, int(tables.capacity[row]))
        found += [
            tables.order[places],
            tables.slot_to_block[places],
            pool[places],
            tables.block_to_slot[lanes],
        ]
    return found


def test_many_rows_at_once_are_as_one_after_the_other() -> None:
    together, apart, chance = make(), make(), random.Random(6)
    held = {row: list(parcels) for row, parcels in enumerate(([0, 1, 2], [3, 4, 5], [6, 7, 8]))}
    for hot in (together, apart):
        for row, parcels in held.items():
            seat(hot, row, parcels)
            use(hot, row, [2], 2)
    for _ in range(60):
        for row in held:
            blocks = chance.sample(range(12), 3)
            for hot in (together, apart):
                use(hot, row, blocks, 12)
        counts = [2, 2, 2]
        for _ in range(3):
            counts[chance.choice([row for row in range(3) if counts[row] < 6])] += 1
        lost = [parcel for row in held for parcel in held[row][counts[row] :]]
        held = {row: parcels[: counts[row]] for row, parcels in held.items()}
        losers = [Resize(1, row, list(parcels)) for row, parcels in held.items()]
        chance.shuffle(lost)
        held = {
            row: parcels + [lost.pop() for _ in range(counts[row] - len(parcels))]
            for row, parcels in held.items()
        }
        resizes = [*losers, *(Resize(1, row, parcels) for row, parcels in held.items())]
        together.resize(resizes)
        for resize in resizes:
            apart.resize([resize])
        for row in held:
            check_bytes(together, row)
            for ours, theirs in zip(owned(together, row), owned(apart, row), strict=True):
                assert torch.equal(ours, theirs)
        together.check_integrity()


def test_bytes_move_in_pieces_where_the_buffer_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.decoder.kv.hot_buffer._MOVED_BYTES", 1)
    test_a_row_that_shrinks_keeps_its_most_recent_blocks_and_their_bytes()


def test_what_is_no_change_of_a_rows_parcels_is_refused() -> None:
    hot = make()
    hot.resize([Resize(0, 1, [0, 1, 2, 3])])
    with pytest.raises(ValueError, match="has no parcels"):
        hot.seat(1, 2)
    hot.resize([Resize(1, 1, [4, 3])])
    hot.seat(1, 2)
    with pytest.raises(ValueError, match="sits already"):
        hot.seat(1, 2)
    for wrong in ([], [3], [3, 4], [4, 5], [3, 4, 1]):
        with pytest.raises(ValueError, match="cannot change to"):
            hot.resize([Resize(1, 1, wrong)])
    hot.check_integrity()


def lose_a_slot(hot: HotBuffer) -> None:
    hot.tables[1].capacity[0] -= 1


def own_a_parcel_twice(hot: HotBuffer) -> None:
    hot.resize([Resize(1, 0, [*FIRST[0], FIRST[1][0]])])


def mix_parcels_up(hot: HotBuffer) -> None:
    hot.tables[1].parcels[0, 0] = FIRST[1][1]


def forget_a_block(hot: HotBuffer) -> None:
    hot.tables[0].block_to_slot[0, 3] = -1


def invent_a_block(hot: HotBuffer) -> None:
    hot.tables[0].block_to_slot[2, 14] = 0


def invent_a_block_of_nobodys(hot: HotBuffer) -> None:
    hot.tables[0].block_to_slot[7, 14] = 0


def swap_two_blocks(hot: HotBuffer) -> None:
    own = hot.tables[2].slot_to_block[FIRST[0][0] * 6 :][:2]
    own.copy_(own.flip(0))


def repeat_a_slot_in_the_order(hot: HotBuffer) -> None:
    hot.tables[1].order[FIRST[0][0] * 6] = hot.tables[1].order[FIRST[0][0] * 6 + 1]


def drop_a_slot_from_the_order(hot: HotBuffer) -> None:
    hot.tables[2].order[FIRST[0][1] * 6 + 1] = -1


FAULTS: tuple[Callable[[HotBuffer], None], ...] = (
    lose_a_slot,
    own_a_parcel_twice,
    mix_parcels_up,
    forget_a_block,
    invent_a_block,
    invent_a_block_of_nobodys,
    swap_two_blocks,
    repeat_a_slot_in_the_order,
    drop_a_slot_from_the_order,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_notices(fault: Callable[[HotBuffer], None]) -> None:
    hot = HotBuffer(
        made_up.shape(),
        ROWS,
        MAX_BLOCKS,
        (CLASSES[0], HotClass(layers=2, parcels=12, parcel_slots=2, floor=2, most=6)),
        made_up.CPU,
    )
    seat(hot, 0, FIRST[0])
    seat(hot, 1, FIRST[1])
    use(hot, 0, [1, 2, 3], 9)
    use(hot, 1, [1, 2, 3], 9)
    hot.check_integrity()
    fault(hot)
    with pytest.raises(AssertionError):
        hot.check_integrity()
