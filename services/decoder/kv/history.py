"""Blocks back into runs of keys and values, for prefill.

Knows the record format (docs/records.md) and nothing of where the blocks came from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kv.shape import KvShape


def gather_history(shape: KvShape, blocks: Tensor, places: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The first `tokens` tokens of a row.

    Args:
        shape: the model's sizes.
        blocks: [all blocks, block elements].
        places: [groups, blocks of the row] int64, in token order.
        tokens: how many to return.

    Returns:
        keys and values, each [tokens, kv_heads, head_dim].
    """
    needed = places[:, : -(-tokens // shape.block_tokens)]
    records = blocks.index_select(0, needed.flatten())
    records = records.view(shape.groups, -1, 2, shape.heads, shape.head_dim)[:, :tokens]
    both: Tensor = records.permute(2, 1, 0, 3, 4).reshape(2, tokens, shape.kv_heads, shape.head_dim)
    key, value = torch.unbind(both)
    return key, value
