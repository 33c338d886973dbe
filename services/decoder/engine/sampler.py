"""From logits to a token, one row at a time, so that no row's draw depends on its batch.

Knows one sequence's wishes and history. In this order: repetition penalty, frequency and presence
penalties, logit bias, stop tokens barred before min_tokens, temperature, top-k, top-p, min-p, one draw.
Log probabilities are the model's own, before any of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.engine.sequence import SampledToken, Sampling, Sequence
from services.decoder.kernels.sample import uniform


def sample(logits: Tensor, sequences: list[Sequence]) -> list[SampledToken | None]:
    """Draw (or, in a replay, look up) the next token of each sequence.

    Args:
        logits: [n, vocab] float32.
        sequences: n of them, in the same order.

    Returns:
        n tokens; None where the model computed no number to choose by (NaN, infinity).
    """
    likeliest = logits.argmax(1)  # a NaN counts as the greatest, so that it is found here
    broken = (~logits.gather(1, likeliest.unsqueeze(1)).isfinite()).squeeze(1).tolist()
    return [
        None if bad else _with_logprobs(row, sequence.sampling, _next(row, best, sequence))
        for row, best, bad, sequence in zip(logits, likeliest.tolist(), broken, sequences, strict=True)
    ]


def score_prompt(logits: Tensor, tokens: list[int], sampling: Sampling) -> list[SampledToken]:
    """Log probabilities of given tokens; row i of `logits` [n, vocab] predicts tokens[i]."""
    return [_with_logprobs(row, sampling, token) for row, token in zip(logits, tokens, strict=True)]


def _next(logits: Tensor, likeliest: int, sequence: Sequence) -> int:
    known = sequence.next_known()
    if known is not None:
        return known
    sampling = sequence.sampling
    barred = len(sequence.generated) < sequence.min_tokens and bool(sequence.stop_ids)
    if sampling.is_greedy and not barred:
        return likeliest
    logits = _penalised(logits, sequence)
    if barred:
        logits[list(sequence.stop_ids)] = float("-inf")
    if sampling.temperature == 0:
        return int(logits.argmax())
    return _draw(logits, sampling, uniform(sequence.seed, len(sequence.generated)))


def _penalised(logits: Tensor, sequence: Sequence) -> Tensor:
    """A copy of the logits with penalties and bias."""
    sampling = sequence.sampling
    logits = logits.clone()
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*sequence.prompt, *sequence.generated}))
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (sampling.frequency_penalty or sampling.presence_penalty) and sequence.generated:
        seen, times = torch.unique(torch.tensor(sequence.generated), return_counts=True)
        logits[seen] -= sampling.frequency_penalty * times + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    return logits


def _draw(logits: Tensor, sampling: Sampling, uniform: float) -> int:
    """Invert the cumulative distribution at `uniform`, likeliest token first; ties in token order.

    Where no distribution is left, because every token is barred or none is kept, the greatest is taken.
    """
    ordered, token = _ordered(logits, sampling.top_k)
    if not ordered[0].isfinite():
        return int(token[0])
    weight = (ordered.double() / sampling.temperature).softmax(0)  # float32 overflows at 1e-38
    kept = torch.ones_like(weight, dtype=torch.bool)
    if sampling.top_p < 1:
        kept &= weight.cumsum(0) - weight < sampling.top_p
    if sampling.min_p > 0:
        kept &= weight >= sampling.min_p * weight[0]
    kept[0] = True
    mass = weight.masked_fill(~kept, 0).cumsum(0)
    place = int(torch.searchsorted(mass, uniform * mass[-1], right=True))
    return int(token[min(place, int(kept.sum()) - 1)])


def _ordered(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` greatest logits (0 = all) and their tokens, greatest first, ties in token order."""
    if not 0 < top_k < logits.shape[0]:
        return logits.sort(descending=True, stable=True)
    least = logits.topk(top_k).values[-1]  # topk itself takes any of the equal ones at its edge
    token = (logits >= least).nonzero().squeeze(1)
    ordered, place = logits[token].sort(descending=True, stable=True)
    return ordered[:top_k], token[place[:top_k]]


def _with_logprobs(logits: Tensor, sampling: Sampling, token: int) -> SampledToken:
    if not sampling.wants_logprobs:
        return SampledToken(token)
    logprobs = logits.log_softmax(0)
    top: tuple[tuple[int, float], ...] = ()
    if sampling.top_logprobs:
        values, ids = logprobs.topk(sampling.top_logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)
