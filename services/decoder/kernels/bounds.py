"""Block bounds: per KV head and block, the elementwise maximum of the roped keys and of their negation.

Knows flat block positions only. Keeping max(-k) instead of min(k) makes an update one maximum and a
score one dot product: for a query q, sum_d max(q_d min_d, q_d max_d) = relu([q, -q]) . [max k, max -k].
(Quest, arXiv 2406.10774, section 3.2; 2/16 of the keys' bytes at 16-token blocks.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BlockBounds(NamedTuple):
    """One layer's bounds, both [pages, blocks a page, kv_heads, 2 * head_dim]."""

    device: Tensor  # by device page: what select reads
    arena: (
        Tensor | None
    )  # by host page: full blocks' bounds, for whoever takes the page over; None: out of reach


def append_bounds(bounds: Tensor, key: Tensor, block: Tensor, fresh: Tensor | None) -> None:
    """Take one new key a row into the bounds of its open block.

    Args:
        bounds: [blocks, kv_heads, 2 * head_dim].
        key: [rows, kv_heads, head_dim].
        block: [rows] int64, distinct.
        fresh: [rows] bool, rows whose block opens with this token and starts afresh; None = no row.
    """
    both = torch.cat([key, -key], dim=2)
    old = bounds.index_select(0, block)
    if fresh is not None:
        old = old.masked_fill(fresh.view(-1, 1, 1), float("-inf"))
    bounds.index_copy_(0, block, torch.maximum(old, both))


def fill_bounds(bounds: Tensor, key: Tensor, block: Tensor, block_tokens: int) -> None:
    """Set the bounds of a run of blocks from all their keys, the last block perhaps partly filled.

    Args:
        bounds: [blocks, kv_heads, 2 * head_dim].
        key: [tokens, kv_heads, head_dim], from the first token of the run's first block.
        block: [ceil(tokens / block_tokens)] int64.
        block_tokens: tokens a block.
    """
    both = torch.cat([key, -key], dim=2)
    lacking = block.shape[0] * block_tokens - key.shape[0]
    if lacking:
        both = torch.cat([both, both.new_full((lacking, *both.shape[1:]), float("-inf"))])
    bounds.index_copy_(0, block, both.view(-1, block_tokens, *both.shape[1:]).amax(1))
