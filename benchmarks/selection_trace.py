"""A made-up indexer: choices of tokens with the locality of a published model's, for many rows at once.

A token's score is a constant of its own, three processes that wander and come back, noise, and a bonus for
recent tokens; the first tokens are always chosen. With 100,384 tokens and 2,048 of them chosen it misses as
arXiv 2608.07009 says of GLM-5.1: 30% of a step's choice was not chosen in the step before, and with room for
twice the choice LRU misses 13.4%. Its memory over hundreds of steps is too short: of a choice 34% comes again
64 steps later, where 56% was published.

Knows statistics; no model and no policy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WALKS = (
    (0.769, 334.0),
    (0.264, 6.9),
    (0.578, 7.0),
)  # sigma, and tau in steps, of Ornstein-Uhlenbeck processes
_NOISE = 0.209
_RECENCY, _RECENCY_STEPS = 0.736, 700.0
_FORCED = 4
SEED = 20260807


def choices(rows: int, tokens: int, top_k: int, steps: int, device: torch.device) -> Tensor:
    """What each row chooses of the `tokens` tokens that it began with, step by step; ascending.

    Args:
        rows: each has scores of its own.
        tokens: more than `top_k`.
        top_k: chosen a step.
        steps: one token each; recency counts from the newest, which none of these tokens is.
        device: where the scores are drawn; they depend on it.

    Returns:
        [steps, rows, top_k] int32.
    """
    generator = torch.Generator(device).manual_seed(SEED)

    def draw() -> Tensor:
        return torch.randn(rows, tokens, generator=generator, device=device)

    constant = draw()
    walks = [draw().mul_(sigma) for sigma, _ in _WALKS]
    age = torch.arange(tokens, 0, -1, device=device, dtype=torch.float32)  # of each token at the first step
    chosen = torch.empty(steps, rows, top_k, dtype=torch.int32, device=device)
    for step in range(steps):
        score = constant + _RECENCY * torch.exp(-(age + step) / _RECENCY_STEPS)
        for walk, (sigma, tau) in zip(walks, _WALKS, strict=True):
            stays = math.exp(-1 / tau)
            walk.mul_(stays).add_(draw(), alpha=sigma * math.sqrt(1 - stays * stays))
            score += walk
        score.add_(draw(), alpha=_NOISE)
        score[:, :_FORCED] = torch.inf
        chosen[step] = score.topk(top_k, dim=1).indices.sort(1).values
    return chosen
