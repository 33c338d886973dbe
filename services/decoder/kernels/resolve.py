"""resolve: logical blocks -> hot slots, with what was missing fetched from the arena.

Knows one layer's tables, pool and arena region. The LRU itself is lru.py.
"""

from __future__ import annotations

from torch import Tensor

from services.decoder.kernels.count import count
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.lru import Assignment, assign
from services.decoder.kernels.step_kernels import LayerStore


def resolve(
    layer: LayerStore, lanes: Tensor, selected: Tensor, open_block: Tensor, host_blocks: Tensor
) -> Assignment:
    """Assign slots and copy the misses; when it returns, every returned slot holds its block.

    Where the layer's arena is out of reach nothing is copied, and the caller brings what misses.

    Args:
        layer: the layer's tables and bytes.
        lanes: [n] int64, distinct.
        selected: [n, top_k] int32 blocks, -1 = none.
        open_block: [n] int64; its slot is returned but not filled: append does that.
        host_blocks: [n, blocks] int64, where each of the lane's blocks lies in `layer.arena`.
    """
    result = assign(layer.tables, lanes, selected, open_block)
    misses = result.miss_block.shape[0]
    if misses and layer.arena is not None:
        source = host_blocks[result.miss_lane, result.miss_block]
        layer.pool.index_copy_(0, result.miss_slot, layer.arena.index_select(0, source))
    count(
        layer.counters,
        {
            Counter.CHOSEN: result.hits + misses,
            Counter.HITS: result.hits,
            Counter.MISSES: misses,
            Counter.EVICTIONS: result.evictions,
            Counter.FETCHED_BYTES: misses * layer.pool.shape[1] * layer.pool.element_size(),
        },
    )
    return result
