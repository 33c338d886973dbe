"""replay: the fetches of one layer's resolve, done again by a layer that shares its tables.

Layers that share an index choose the same blocks and so need the same slots; only their bytes differ. Knows a
plan, one layer's pool and its arena region; no tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kernels.count import count
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.lru import Assignment
from services.decoder.kernels.step_kernels import LayerStore, MissPlan


def plan_of(found: Assignment, host_blocks: Tensor) -> MissPlan:
    """The plan of one resolve.

    Args:
        found: what resolve returned for n lanes.
        host_blocks: [n, blocks] int64, as resolve was given it.
    """
    count = torch.bincount(found.miss_lane, minlength=found.slots.shape[0])
    source = host_blocks[found.miss_lane, found.miss_block]
    return MissPlan(by_lane(source, found), by_lane(found.miss_slot, found), count.int())


def by_lane(of_misses: Tensor, found: Assignment) -> Tensor:
    """[lanes, top_k] int32: a number of each miss, lane by lane in the sequence of the selection; -1 pads."""
    placed = torch.full_like(found.slots, -1)
    count = torch.bincount(found.miss_lane, minlength=placed.shape[0])
    column = torch.arange(found.miss_lane.shape[0], device=count.device)
    column -= (count.cumsum(0) - count)[found.miss_lane]
    placed[found.miss_lane, column] = of_misses.int()
    return placed


def fetches(plan: MissPlan) -> tuple[Tensor, Tensor]:
    """What a plan names, without its padding: blocks of the arena and pool slots, both [misses] int64."""
    wanted = torch.arange(plan.source.shape[1], device=plan.count.device) < plan.count.unsqueeze(1)
    return plan.source[wanted].long(), plan.target[wanted].long()


def replay(layer: LayerStore, plan: MissPlan) -> None:
    """Fetch what the plan names from `layer.arena`, which is in reach, into `layer.pool`; count it.

    What was chosen and hit is the anchor's to count.
    """
    assert layer.arena is not None, "whoever cannot reach it does not replay"
    source, target = fetches(plan)
    layer.pool.index_copy_(0, target, layer.arena.index_select(0, source))
    misses = target.shape[0]
    fetched = misses * layer.pool.shape[1] * layer.pool.element_size()
    count(layer.counters, {Counter.MISSES: misses, Counter.FETCHED_BYTES: fetched})
