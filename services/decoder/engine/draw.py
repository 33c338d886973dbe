"""The step's draw: from logits to tokens, on the device or on the host, behind one call.

Knows sequences and logits. What a draw means stands in sampler.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.sampler import sample
from services.decoder.engine.sequence import SampledToken, Sequence


class Draw(Protocol):
    """Called from the engine's loop alone."""

    def seat(self, sequence: Sequence) -> None:
        """Take in a sequence that has a row, before its first draw."""

    def draw(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken | None]:
        """The next token of each sequence; None where its logits are no numbers.

        Args:
            logits: [at least n, vocab]; what follows the n-th row is padding.
            sequences: n of them, in the same order.
        """


class HostDraw:
    """Row by row, on the host."""

    def seat(self, sequence: Sequence) -> None:
        """Nothing to remember: the sequence says it all."""

    def draw(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken | None]:
        """As sampler.py says."""
        return sample(logits[: len(sequences)].float(), sequences)


class DeviceDraw:
    """All rows in one launch; the host waits once, for the tokens."""

    def __init__(self, sampler: DeviceSampler, rows: int) -> None:
        self._sampler = sampler
        self._tokens = torch.empty(rows, dtype=torch.int32, pin_memory=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def seat(self, sequence: Sequence) -> None:
        """Put its wishes and history into the device's tables."""
        self._sampler.seat(sequence)

    def draw(self, logits: Tensor, sequences: list[Sequence]) -> list[SampledToken | None]:
        """Launch, copy the tokens back, wait for them."""
        count = len(sequences)
        greedy = self._sampler.prepare(sequences)
        drawn = self._sampler.draw(logits, greedy=greedy)[:count]
        self._tokens[:count].copy_(drawn, non_blocking=True)
        self._done.record()
        told = self._logprobs(logits, drawn, sequences)
        self._done.synchronize()
        tokens: list[int] = self._tokens[:count].tolist()
        return [None if token < 0 else told.get(row, SampledToken(token)) for row, token in enumerate(tokens)]

    def _logprobs(self, logits: Tensor, drawn: Tensor, sequences: list[Sequence]) -> dict[int, SampledToken]:
        """By row, for those who asked."""
        rows = [row for row, s in enumerate(sequences) if s.sampling.logprobs or s.sampling.prompt_logprobs]
        if not rows:
            return {}
        most = max(sequences[row].sampling.top_logprobs for row in rows)
        chosen, values, ids = (
            part.tolist() for part in self._sampler.logprobs(logits[rows], drawn[rows], most)
        )
        tokens = drawn[rows].tolist()
        told = {}
        for place, row in enumerate(rows):
            top = sequences[row].sampling.top_logprobs
            likeliest = tuple(zip(ids[place][:top], values[place][:top], strict=True))
            told[row] = SampledToken(tokens[place], chosen[place], likeliest)
        return told
