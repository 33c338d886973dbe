"""attend: decode attention over hot slots.

Knows slots and positions, not rows' histories. Softmax and sums are accumulated in float32 by torch.
Prefill's dense attention is attend_part.py's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend_slots(
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    selected: Tensor,
    length: Tensor,
    scaling: float,
    first: Tensor | None = None,
) -> Tensor:
    """One query a row over the blocks its lanes chose, masked to the row's true length.

    Args:
        query: [rows, query heads, head_dim].
        pool: [pool slots, block_tokens, 2, heads of a group, head_dim].
        slots: [rows * groups, top_k] int32 pool slots, -1 = none; at least one is valid in every lane.
        selected: [rows * groups, top_k] int32, the blocks in those slots, -1 = none.
        length: [rows * groups] int64 tokens, the newest included.
        scaling: factor on q.k.
        first: [rows * groups] int64, the first token of each that is seen; None = all in those blocks.

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
    if first is not None:
        seen &= position >= first.view(-1, 1, 1)
    # The query heads that share a KV head stand where torch expects several query positions.
    out = scaled_dot_product_attention(
        query.reshape(lanes, heads, -1, head_dim),
        records[0],
        records[1],
        attn_mask=seen.view(lanes, 1, 1, -1),
        scale=scaling,
    )
    return out.reshape(rows, query_heads, head_dim)
