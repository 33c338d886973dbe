"""append: a decode step's new records into the open block's slot and, write-through, into the arena.

Knows flat record positions only; who may write where was settled before.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_records(key: Tensor, value: Tensor, groups: int) -> Tensor:
    """Records as they lie in memory (docs/records.md): keys of the group's heads, then their values.

    Args:
        key: [tokens, kv_heads, head_dim], after rope.
        value: the same shape; [tokens, kv_heads, 0] where the key is all there is.
        groups: divides kv_heads.

    Returns:
        [tokens * groups, record elements], token-major.
    """
    tokens, kv_heads, _ = key.shape
    sides = [side.reshape(tokens * groups, kv_heads // groups * side.shape[2]) for side in (key, value)]
    return torch.cat(sides, dim=1)


def append(
    records: Tensor, pool: Tensor, pool_index: Tensor, arena: Tensor | None, arena_index: Tensor
) -> None:
    """Write each record to the device and, where it is in reach, to the arena.

    Args:
        records: [n, record elements].
        pool: [pool slots * block_tokens, record elements].
        pool_index: [n] int64 record positions in `pool`.
        arena: [host blocks * block_tokens, record elements], or None.
        arena_index: [n] int64 record positions in `arena`.
    """
    pool.index_copy_(0, pool_index, records)
    if arena is not None:
        arena.index_copy_(0, arena_index, records)
