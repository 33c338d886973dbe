"""attend_half: decode attention over what was resident, or over what had to come; and which is which.

Knows slots and positions, no row's history. Two halves merge into the whole by merge_parts of attend_part.py;
which bits come out depends on how the selection was split, so on what was resident.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.lru import Assignment
from services.decoder.kernels.record_code import decode_records
from services.decoder.kernels.replay import by_lane
from services.decoder.kernels.step_kernels import Split

_NOTHING = -1e30
"""The weight of a half in which a query sees nothing: finite, so that it merges with any other."""


def split_of(found: Assignment, selected: Tensor) -> Split:
    """Who of a selection is resident, and who is fetched.

    Args:
        found: what resolve returned for n lanes.
        selected: [n, top_k] int32 blocks, as resolve was given them.
    """
    hits = selected.masked_fill(torch.isin(found.slots.long(), found.miss_slot), -1)
    return Split(hits, by_lane(found.miss_block, found))


def attend_half(
    query: Tensor, pool: Tensor, slots: Tensor, half: Tensor, length: Tensor, scaling: float
) -> Part:
    """attend.py's attend_slots over one half.

    Args:
        query: [rows, query heads, head_dim].
        pool: [pool slots, block_tokens, 2, heads of a group, head_dim].
        slots: [rows * groups, top_k] int32 pool slots.
        half: [rows * groups, top_k] int32, the blocks of this half in those slots, -1 = none.
        length: [rows * groups] int64 tokens, the newest included.
        scaling: factor on q.k.

    Returns:
        a Part whose `out` is [rows, query heads, head_dim] float32; zeros where a lane sees nothing.
    """
    rows, query_heads, head_dim = query.shape
    lanes = slots.shape[0]
    heads = pool.shape[3]
    seen = _seen(half, pool.shape[1], length)
    blocks = pool.index_select(0, slots.clamp_min(0).flatten())
    records = blocks.view(*seen.shape, *pool.shape[2:]).float()
    # Zeros where a token is not seen, whatever lies there.
    key, value = records.masked_fill(~seen.view(*seen.shape, 1, 1, 1), 0).unbind(2)
    own = query.float().reshape(lanes, heads, -1, head_dim)
    scores = torch.einsum("lhqd,lthd->lhqt", own, key) * scaling
    weights, lse = _softmax(scores, seen)
    out = torch.einsum("lhqt,lthd->lhqd", weights, value)
    return Part(out.reshape(rows, query_heads, head_dim), lse.reshape(rows, query_heads))


def attend_latent_half(
    query: Tensor, pool: Tensor, slots: Tensor, half: Tensor, length: Tensor, scaling: float, latent: int
) -> Part:
    """attend_latent.py over one half.

    Args:
        query: [rows, heads, latent + roped], absorbed.
        pool: [pool slots, block_tokens, latent + roped], or coded (record_code.py).
        slots: [rows, top_k] int32 pool slots.
        half: [rows, top_k] int32, the blocks of this half in those slots, -1 = none.
        length: [rows] int64 tokens, the newest included.
        scaling: factor on q.k.
        latent: numbers of a record that are its value.

    Returns:
        a Part whose `out` is [rows, heads, latent] float32; zeros where a row sees nothing.
    """
    seen = _seen(half, pool.shape[1], length)
    record = pool.index_select(0, slots.clamp_min(0).flatten()).flatten(0, 1)
    if pool.dtype == torch.uint8:
        record = decode_records(record, latent, query.shape[2] - latent, query.dtype)
    record = record.float().view(*seen.shape, -1).masked_fill(~seen.unsqueeze(2), 0)
    scores = query.float() @ record.transpose(1, 2) * scaling
    weights, lse = _softmax(scores.unsqueeze(1), seen)
    return Part(weights.squeeze(1) @ record[..., :latent], lse.squeeze(1))


def _seen(half: Tensor, block_tokens: int, length: Tensor) -> Tensor:
    """[lanes, tokens] bool."""
    position = half.unsqueeze(2) * block_tokens + torch.arange(block_tokens, device=half.device)
    return ((position < length.view(-1, 1, 1)) & (half >= 0).unsqueeze(2)).flatten(1)


def _softmax(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of [lanes, heads, queries, tokens] scores, and [lanes, heads, queries] what they sum to."""
    scores = scores.masked_fill(~seen.view(seen.shape[0], 1, 1, -1), float("-inf"))
    total = scores.logsumexp(3).clamp_min(_NOTHING)
    return (scores - total.unsqueeze(3)).exp(), total
