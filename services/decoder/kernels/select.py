"""select: Quest's scores and their exact top-k, for all lanes at once.

Knows bounds and queries; not where blocks lie. Ties go to the lowest block. The open block is always
chosen. A row whose blocks all fit the budget chooses every one, in order, without looking at scores:
the choice is the same set, and cheaper.
"""

from __future__ import annotations

import torch
from torch import Tensor


def score_blocks(bounds: Tensor, pages: Tensor, query: Tensor, groups: int) -> Tensor:
    """Upper bounds of q.k over each block, summed over the query heads of a group.

    Args:
        bounds: [device pages, blocks a page, kv_heads, 2 * head_dim], as bounds.py keeps them.
        pages: [rows, P] int64 device pages of each row, any valid page past its end.
        query: [rows, query heads, head_dim].
        groups: selections a row; divides kv_heads.

    Returns:
        [rows, groups, P * blocks a page] float32.
    """
    rows, query_heads, head_dim = query.shape
    kv_heads = bounds.shape[2]
    query = query.float()
    # The score is linear in relu([q, -q]), so the heads that share keys are summed before the product.
    weight = torch.cat([query, -query], dim=2).relu_()
    weight = weight.view(rows, kv_heads, query_heads // kv_heads, 2 * head_dim).sum(2)
    gathered = bounds.view(bounds.shape[0], -1).index_select(0, pages.reshape(-1))
    products = gathered.view(rows, -1, kv_heads, 2 * head_dim) * weight.unsqueeze(1)
    scores = products.view(rows, -1, groups, products.shape[2] // groups * 2 * head_dim).sum(3)
    return scores.transpose(1, 2)


def top_blocks(scores: Tensor, open_block: Tensor, top_k: int) -> Tensor:
    """The best blocks of each lane.

    Args:
        scores: [rows, groups, blocks] float32; values past a row's open block are ignored.
        open_block: [rows] int64.
        top_k: most blocks to choose.

    Returns:
        [rows, groups, min(top_k, blocks)] int32, best first, -1 pads.
    """
    count = scores.shape[2]
    block = torch.arange(count, device=scores.device)
    last = open_block.view(-1, 1, 1)
    beyond = block > last
    ranked = scores.masked_fill(beyond, float("-inf")).masked_fill(block == last, float("inf"))
    width = min(top_k, count)
    best = ranked.sort(dim=2, descending=True, stable=True).indices[:, :, :width]
    everything = all_blocks(open_block, scores.shape[1], width)
    return torch.where(last < width, everything, best.int())


def all_blocks(open_block: Tensor, groups: int, width: int) -> Tensor:
    """Every block of each row in order, `[rows, groups, width]` int32, -1 pads."""
    block = torch.arange(width, dtype=torch.int32, device=open_block.device)
    chosen = block.masked_fill(block > open_block.unsqueeze(1), -1)  # [rows, width]
    return chosen.unsqueeze(1).expand(-1, groups, -1)
