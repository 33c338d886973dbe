"""MiniMax-M3's scores: each block by its best token, for heads that share index keys.

Knows index queries, index keys and where a row's blocks lie; not what is attended to.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCKS_AT_ONCE = 16
"""Blocks whose tokens' scores are held at once."""


def score_by_best_token(query: Tensor, position: Tensor, keys: Tensor, places: Tensor) -> Tensor:
    """The largest dot product of each query's heads in each block.

    Args:
        query: [T, heads, dim], after rope.
        position: [T] int64; a query sees the tokens up to its own.
        keys: [device blocks, block_tokens, dim], those of all rows.
        places: [n] int64, where the row's blocks lie in `keys`, in their order.

    Returns:
        [T, heads, n] float32, -inf where a query sees no token of a block.
    """
    block_tokens = keys.shape[1]
    parts = []
    for first in range(0, places.shape[0], _BLOCKS_AT_ONCE):
        some = keys.index_select(0, places[first : first + _BLOCKS_AT_ONCE]).flatten(0, 1)
        scores = torch.einsum("thd,nd->thn", query.float(), some.float())
        token = first * block_tokens + torch.arange(some.shape[0], device=keys.device)
        scores.masked_fill_((token > position.unsqueeze(1)).unsqueeze(1), float("-inf"))
        parts.append(scores.view(*scores.shape[:2], -1, block_tokens).amax(3))
    return torch.cat(parts, 2)
