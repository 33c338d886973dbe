"""choose_tokens: DSA's scores of tokens and their exact top-k, a window of keys at a time.

Knows index queries, index keys and where a row's keys lie; not what is attended to. A query scores token t as
the sum over index heads h of weight_h * relu(q_h . k_t), in float32 (DeepSeek-V3.2's report; the model's two
constant factors are in the weights already). Ties go to the lowest token. A query that sees no more than
`top_k` tokens takes every one, in order, whatever the scores: it is the same set, and cheaper.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.kernels.index_code import decode_keys

_SCORES_AT_ONCE = 2**23
"""Products of heads, queries and keys that are held at once: 32 MiB."""
_WINDOW = 2048  # keys that are scored at once; the same for all, so that every mode adds up the same


_PROMPT_SCORES = 2**24
"""Scores of a prompt's tokens that a GPU holds at once, 64 MiB: those of 102 tokens in a context of 160K."""


class IndexQuery(NamedTuple):
    """What the indexer makes of T tokens, to choose for them."""

    query: Tensor  # [T, index heads, index_dim], after rope
    weight: Tensor  # [T, index heads] float32, of each head in the sum


def score_elements(rows: int, max_tokens: int) -> int:
    """Scores that a GPU has room for: those of all rows that decode, or of some of a prompt's tokens.

    Args:
        rows: most rows of a step.
        max_tokens: of the longest row.
    """
    return max(rows * score_pitch(max_tokens), _PROMPT_SCORES)


def score_pitch(tokens: int) -> int:
    """From one query's scores there to the next one's; they are read four at a time."""
    return -(-tokens // 4) * 4


def choose_tokens(index: IndexQuery, keys: Tensor, places: Tensor, start: int, top_k: int) -> Tensor:
    """The best tokens for a run of one row's queries.

    Args:
        index: of T consecutive tokens.
        keys: [entries, index_dim], those of all rows.
        places: [start + T] int64, where the row's keys lie in `keys`.
        start: position of the first query; each query sees the tokens up to its own.
        top_k: most tokens to choose.

    Returns:
        [T, min(top_k, start + T)] int32 positions, best first, -1 pads.
    """
    tokens, heads = index.weight.shape
    width = min(top_k, start + tokens)
    position = torch.arange(start, start + tokens, device=keys.device)
    every = torch.arange(width, dtype=torch.int32, device=keys.device).expand(tokens, -1)
    chosen = every.masked_fill(every > position.unsqueeze(1), -1)
    few = max(0, min(tokens, top_k - start))  # queries that see no more than top_k tokens
    step = max(1, _SCORES_AT_ONCE // (heads * _WINDOW))
    for first in range(few, tokens, step):
        some = slice(first, min(first + step, tokens))
        part = IndexQuery(index.query[some], index.weight[some])
        chosen[some] = _best(part, keys, places[: start + some.stop], position[some], top_k)
    return chosen


def _best(index: IndexQuery, keys: Tensor, places: Tensor, position: Tensor, top_k: int) -> Tensor:
    """[t, top_k] int32 for queries that all see more than `top_k` of the tokens at `places`."""
    tokens = index.weight.shape[0]
    best = torch.empty(tokens, 0, dtype=torch.float32, device=keys.device)
    where = torch.empty(tokens, 0, dtype=torch.int64, device=keys.device)
    for first in range(0, places.shape[0], _WINDOW):
        window = keys.index_select(0, places[first : first + _WINDOW])
        token = torch.arange(first, first + window.shape[0], device=keys.device)
        scores = score_tokens(index, window).masked_fill(token > position.unsqueeze(1), float("-inf"))
        # Earlier tokens stand first in a stable sort, so they win ties.
        found = torch.cat([best, scores], dim=1).sort(dim=1, descending=True, stable=True)
        taken = found.indices[:, :top_k]
        best = found.values[:, :top_k]
        where = torch.cat([where, token.expand(tokens, -1)], dim=1).gather(1, taken)
    return where.int()


def score_tokens(index: IndexQuery, keys: Tensor) -> Tensor:
    """Scores of `keys` [n, index_dim], or coded ones (index_code.py), for every query: [T, n] float32."""
    tokens, heads, size = index.query.shape
    plain = decode_keys(keys) if keys.dtype == torch.uint8 else keys.float()
    products = index.query.float().reshape(-1, size) @ plain.t()
    return torch.bmm(index.weight.unsqueeze(1), products.relu_().view(tokens, heads, -1)).squeeze(1)
