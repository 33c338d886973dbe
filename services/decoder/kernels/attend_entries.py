"""NSA's coarse branch: attention over entries that sum up some tokens each, and what it says of blocks.

Knows entries in the order of their tokens; not where they lie. An entry is seen from the token on that
completes it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_entries(
    query: Tensor, position: Tensor, entries: Tensor, entry_tokens: int, each: int
) -> tuple[Tensor, Tensor]:
    """Attention of T queries of each of B rows.

    Args:
        query: [B, T, query heads, head_dim].
        position: [B, T] int64, of each query.
        entries: [B, n, 2, kv_heads, head_dim], keys and values; n a multiple of `each`.
        entry_tokens: tokens of an entry.
        each: entries of a block.

    Returns:
        [B, T, query heads, head_dim], zeros where no entry is complete yet; and what the blocks weigh in it,
        summed over the query heads of a KV head, [B, T, kv_heads, n / each] float32.
    """
    key, value = entries.float().unbind(2)  # [B, n, kv_heads, head_dim]
    rows, size, kv_heads, head_dim = key.shape
    tokens = query.shape[1]
    heads = query.float().reshape(rows, tokens, kv_heads, -1, head_dim)
    scores = torch.einsum("btghd,bngd->btghn", heads, key) * head_dim**-0.5
    complete = (torch.arange(size, device=key.device) + 1) * entry_tokens - 1  # token that completes each
    seen = complete <= position.unsqueeze(2)  # [B, T, n]
    unseen = ~seen.view(rows, tokens, 1, 1, size)
    # Where nothing is seen yet, softmax over nothing is taken to be nothing.
    share = scores.masked_fill(unseen, float("-inf")).softmax(4).masked_fill(unseen, 0)
    # An entry that is not seen may hold another request's numbers: not even zero times those.
    safe = value.masked_fill(~seen.any(1).view(rows, size, 1, 1), 0)
    out = torch.einsum("btghn,bngd->btghd", share, safe).flatten(2, 3).to(query.dtype)
    return out, share.sum(3).view(rows, tokens, kv_heads, -1, each).sum(4)
