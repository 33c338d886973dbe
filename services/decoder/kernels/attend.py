"""attend: decode attention over hot slots, and dense causal attention for prefill.

Knows slots and positions, not rows' histories. Softmax and sums are accumulated in float32 by torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def attend_slots(
    query: Tensor, pool: Tensor, slots: Tensor, selected: Tensor, length: Tensor, scaling: float
) -> Tensor:
    """One query a row over the blocks its lanes chose, masked to the row's true length.

    Args:
        query: [rows, query heads, head_dim].
        pool: [pool slots, block_tokens, 2, heads of a group, head_dim].
        slots: [rows * groups, top_k] int32 pool slots, -1 = none; at least one is valid in every lane.
        selected: [rows * groups, top_k] int32, the blocks in those slots, -1 = none.
        length: [rows * groups] int64 tokens, the newest included.
        scaling: factor on q.k.

    Returns:
        [rows, query heads, head_dim].
    """
    rows, query_heads, head_dim = query.shape
    block_tokens, _, heads, _ = pool.shape[1:]
    lanes, top_k = slots.shape
    # A lane pads with one of its own slots, so that no other row's bytes are ever multiplied.
    own = torch.where(slots < 0, slots.amax(1, keepdim=True), slots)
    records = pool.view(pool.shape[0], -1).index_select(0, own.reshape(-1))
    records = records.view(lanes, top_k * block_tokens, 2, heads, head_dim).permute(2, 0, 3, 1, 4)
    position = selected.unsqueeze(2) * block_tokens + torch.arange(block_tokens, device=pool.device)
    seen = (position < length.view(-1, 1, 1)) & (selected >= 0).unsqueeze(2)
    # The query heads that share a KV head stand where torch expects several query positions.
    out = scaled_dot_product_attention(
        query.view(lanes, heads, -1, head_dim),
        records[0],
        records[1],
        attn_mask=seen.view(lanes, 1, 1, -1),
        scale=scaling,
    )
    return out.reshape(rows, query_heads, head_dim)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, start: int, scaling: float) -> Tensor:
    """A run of queries over all tokens up to each.

    Args:
        query: [tokens, query heads, head_dim], of positions start, start + 1, ...
        key: [start + tokens, kv_heads, head_dim].
        value: the same shape as `key`.
        start: position of the first query.
        scaling: factor on q.k.

    Returns:
        [tokens, query heads, head_dim].
    """
    tokens, heads, head_dim = query.shape
    if query.is_cuda:
        # KV heads stand where torch expects a batch, each seen by all its query heads. The kernels that keep
        # no mask and no scores in memory take this in any dtype; enable_gqa leaves float32 to one that does.
        per_kv = heads // key.shape[1]
        shared_key, shared_value = (
            part.transpose(0, 1).unsqueeze(1).expand(-1, per_kv, -1, -1) for part in (key, value)
        )
        out = scaled_dot_product_attention(
            query.view(tokens, -1, per_kv, head_dim).permute(1, 2, 0, 3),
            shared_key,
            shared_value,
            attn_mask=causal_lower_right(tokens, start + tokens),
            scale=scaling,
        )
        return out.flatten(0, 1).transpose(0, 1)
    seen = None
    if start:
        position = torch.arange(start, start + tokens, device=query.device)
        seen = torch.arange(start + tokens, device=query.device) <= position.unsqueeze(1)
    out = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=seen,
        is_causal=seen is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
