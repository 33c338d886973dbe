"""attend_masked: prefill's attention over a part, where each query sees blocks of its own.

Knows keys, values and who sees what, by KV head; not who chose it. What is computed in vain costs less than
gathering each query's own records.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part

_SCORES_AT_ONCE = 2**23
"""Scores of queries, heads and keys that are held at once: 32 MiB."""
_NOTHING = -1e30
"""The weight of a part in which a query sees nothing: finite, so that two such parts merge into a third."""


class Sight(NamedTuple):
    """What each of T consecutive tokens of a row may see: the blocks named, up to itself."""

    start: int  # position of the first
    blocks: Tensor  # [T, groups or 1, n] int32, -1 = none; 1 = all groups see the same
    block_tokens: int
    window: int = 0  # newest tokens, of which all others are out of sight; 0 = none are for that

    def mask(self, first: int, count: int) -> Tensor:
        """[T, groups or 1, count] bool: of the tokens from `first` on, which begins a block."""
        blocks = -(-count // self.block_tokens)
        near = self.blocks - first // self.block_tokens
        near = near.masked_fill((near < 0) | (near >= blocks), -1)
        seen = blocks_seen(near, blocks).repeat_interleave(self.block_tokens, 2)[..., :count]
        token = torch.arange(first, first + count, device=seen.device)
        position = torch.arange(self.start, self.start + seen.shape[0], device=seen.device).unsqueeze(1)
        past = token <= position
        if self.window:
            past &= token > position - self.window
        return seen & past.unsqueeze(1)


def attend_masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scaling: float) -> Part:
    """Attention of T queries over those of n keys that each sees.

    Args:
        query: [T, query heads, head_dim].
        key: [n, kv_heads, head_dim].
        value: the same shape.
        seen: [T, kv_heads or 1, n] bool; 1 = all heads see the same.
        scaling: factor on q.k.

    Returns:
        a Part whose `out` is [T, query heads, head_dim] float32; zeros where a query sees nothing.
    """
    tokens, heads, head_dim = query.shape
    size, kv_heads, _ = key.shape
    keys, values = (part.float().transpose(0, 1) for part in (key, value))  # [kv_heads, n, head_dim]
    out = torch.empty(tokens, heads, head_dim, device=query.device)
    lse = torch.empty(tokens, heads, device=query.device)
    step = max(1, _SCORES_AT_ONCE // (heads * size))
    for first in range(0, tokens, step):
        some = slice(first, min(first + step, tokens))
        own = query[some].float().view(-1, kv_heads, heads // kv_heads, head_dim)
        scores = torch.einsum("tghd,gnd->tghn", own, keys) * scaling
        visible = seen[some].unsqueeze(2)  # [t, kv_heads or 1, 1, n]
        scores.masked_fill_(~visible, float("-inf"))
        total = scores.logsumexp(3)
        weight = torch.where(visible.any(3), total, _NOTHING)
        lse[some] = weight.flatten(1)
        made = torch.einsum("tghn,gnd->tghd", scores.sub_(weight.unsqueeze(3)).exp_(), values)
        out[some] = made.flatten(1, 2)
    return Part(out, lse)


def blocks_seen(chosen: Tensor, blocks: int) -> Tensor:
    """[T, groups, top_k] integers, -1 = none -> [T, groups, blocks] bool."""
    seen = torch.zeros(*chosen.shape[:2], blocks + 1, dtype=torch.bool, device=chosen.device)
    seen.scatter_(2, chosen.long().masked_fill(chosen < 0, blocks), True)
    return seen[..., :blocks]
