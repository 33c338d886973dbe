"""A layer that shares another's tables: the plan of what was fetched, and the same fetches again."""

from __future__ import annotations

import torch

from services.decoder.kernels.counter import Counter
from services.decoder.kernels.lanes import layer_of
from services.decoder.kernels.replay import plan_of, replay
from services.decoder.kernels.resolve import resolve
from services.decoder.kernels.step_kernels import LayerStore, MissPlan
from tests.decoder.parcels import Parcels

LANES, BLOCKS, CAPACITY, TOP_K = 3, 40, 9, 6


def layer_with(bytes_of: int, tables: LayerStore | None = None) -> LayerStore:
    """Blocks of two elements, each another number; with `tables`, those of that layer."""
    if tables is None:
        parcels = Parcels(LANES, 1, BLOCKS, CAPACITY, 1, device=torch.device("cpu"))
        for row in range(LANES):
            parcels.seat(row, CAPACITY, BLOCKS - 1)
        own = layer_of(parcels.tables, 0)
    else:
        own = tables.tables
    arena = torch.arange(LANES * BLOCKS * 2).view(-1, 2) + bytes_of
    pool = torch.zeros(LANES * CAPACITY, 2, dtype=torch.int64)
    return LayerStore(own, pool, arena, torch.zeros(len(Counter), dtype=torch.int64))


def test_a_follower_holds_what_its_anchor_chose() -> None:
    generator = torch.Generator().manual_seed(5)
    anchor = layer_with(1000)
    follower = layer_with(9000, anchor)
    lanes = torch.arange(LANES)
    opened = torch.full((LANES,), BLOCKS - 1)
    home = torch.randperm(LANES * BLOCKS, generator=generator).view(LANES, BLOCKS)
    misses = 0
    for _ in range(30):
        selected = torch.randint(-1, BLOCKS - 1, (LANES, TOP_K), generator=generator).int()
        found = resolve(anchor, lanes, selected, opened, home)
        plan = plan_of(found, home)
        replay(follower, plan)
        misses += found.miss_block.shape[0]
        assert int(plan.count.sum()) == found.miss_block.shape[0]
        chosen = selected >= 0
        assert follower.arena is not None
        held = follower.pool[found.slots[chosen].long()]
        assert torch.equal(held, follower.arena[home.gather(1, selected.clamp_min(0).long())[chosen]])
    assert follower.counters[Counter.MISSES] == anchor.counters[Counter.MISSES] == misses > 0
    assert follower.counters[Counter.FETCHED_BYTES] == anchor.counters[Counter.FETCHED_BYTES]
    assert follower.counters[Counter.CHOSEN] == 0, "the anchor's to count"


def test_columns_beyond_the_count_mean_nothing() -> None:
    layer = layer_with(0)
    plan = MissPlan(
        source=torch.tensor([[3, 99_999], [99_999, 99_999]], dtype=torch.int32),
        target=torch.tensor([[5, 99_999], [99_999, 99_999]], dtype=torch.int32),
        count=torch.tensor([1, 0], dtype=torch.int32),
    )
    replay(layer, plan)
    assert layer.pool[5].tolist() == [6, 7]
    assert int(torch.count_nonzero(layer.pool)) == 2


def test_a_plan_keeps_the_sequence_of_the_selection_and_leaves_out_the_open_block() -> None:
    layer = layer_with(0)
    selected = torch.tensor([[7, 39, 2, 7, -1, 5]], dtype=torch.int32)
    home = torch.arange(BLOCKS).unsqueeze(0) + 10
    found = resolve(layer, torch.tensor([1]), selected, torch.tensor([39]), home)
    plan = plan_of(found, home)
    assert plan.count.tolist() == [3]
    assert plan.source[0, :3].tolist() == [17, 12, 15]
    assert plan.target[0, :3].tolist() == found.slots[0, [0, 2, 5]].tolist()
