"""resolve: logical blocks -> hot slots, with what was missing fetched from the arena.

Knows one layer's tables, pool and arena region. The LRU itself is lru.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.decoder.kernels.counter import Counter as Counter
from services.decoder.kernels.lru import Assignment, LaneTables, assign


@dataclass(frozen=True, slots=True)
class ResolveParams:
    """What one layer brings to resolve."""

    tables: LaneTables
    pool: Tensor  # [pool slots, block elements]
    arena: Tensor  # [host blocks, block elements], in the order of docs/records.md
    counters: Tensor  # [len(Counter)] int64, of this layer


def resolve(
    params: ResolveParams, lanes: Tensor, selected: Tensor, open_block: Tensor, host_blocks: Tensor
) -> Assignment:
    """Assign slots and copy the misses; when it returns, every returned slot holds its block.

    Args:
        params: the layer's tables and bytes.
        lanes: [n] int64, distinct.
        selected: [n, top_k] int32 blocks, -1 = none.
        open_block: [n] int64; its slot is returned but not filled: append does that.
        host_blocks: [n, blocks] int64, where each of the lane's blocks lies in `params.arena`.
    """
    result = assign(params.tables, lanes, selected, open_block)
    misses = result.miss_block.shape[0]
    if misses:
        source = host_blocks[result.miss_lane, result.miss_block]
        params.pool.index_copy_(0, result.miss_slot, params.arena.index_select(0, source))
    counters = params.counters
    counters[Counter.CHOSEN] += result.hits + misses
    counters[Counter.HITS] += result.hits
    counters[Counter.MISSES] += misses
    counters[Counter.EVICTIONS] += result.evictions
    counters[Counter.FETCHED_BYTES] += misses * params.pool.shape[1] * params.pool.element_size()
    return result
