"""The step's draw: from logits to tokens, on the device or on the host, behind one call.

Knows sequences and logits. What a draw means stands in sampler.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.sampler import sample
from services.decoder.engine.sequence import SampledToken, Sequence


class Drawn(Protocol):
    """Tokens that are on their way."""

    @property
    def is_there(self) -> bool:
        """Whether `collect` would not wait."""

    def collect(self) -> list[SampledToken | None]:
        """Wait for the next token of each sequence; None where its logits are no numbers. Call it once."""


class Draw(Protocol):
    """Called from the engine's loop alone."""

    def seat(self, sequence: Sequence) -> None:
        """Take in a sequence that has a row, before its first draw."""

    def launch(self, logits: Tensor, sequences: list[Sequence], late: list[int]) -> Drawn:
        """Begin to draw the next token of each sequence; at most two draws are under way at a time.

        Args:
            logits: [at least n, vocab]; what follows the n-th row is padding.
            sequences: n of them, in the same order.
            late: of each, tokens of draws before this one that have not been booked yet: 0 or 1.
        """


@dataclass(frozen=True, slots=True)
class _Known:
    tokens: list[SampledToken | None]

    @property
    def is_there(self) -> bool:
        return True

    def collect(self) -> list[SampledToken | None]:
        return self.tokens


class HostDraw:
    """Row by row, on the host, at once."""

    def seat(self, sequence: Sequence) -> None:
        """Nothing to remember: the sequence says it all."""

    def launch(self, logits: Tensor, sequences: list[Sequence], late: list[int]) -> Drawn:
        """As sampler.py says."""
        if any(late):
            raise ValueError("the host draws from the books, which must be complete")
        return _Known(sample(logits[: len(sequences)].float(), sequences))


@dataclass(frozen=True, slots=True)
class _Coming:
    tokens: Tensor  # [n] int32, pinned
    done: torch.cuda.Event
    told: dict[int, SampledToken]

    @property
    def is_there(self) -> bool:
        there: bool = self.done.query()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return there

    def collect(self) -> list[SampledToken | None]:
        self.done.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return [
            None if token < 0 else self.told.get(row, SampledToken(token)) for row, token in enumerate(tokens)
        ]


class DeviceDraw:
    """All rows in one launch; the host waits once, for the tokens."""

    def __init__(self, sampler: DeviceSampler, rows: int) -> None:
        self._sampler = sampler
        # Two draws may be under way, so two places for what comes back.
        self._tokens = torch.empty(2, rows, dtype=torch.int32, pin_memory=True)
        self._turn = 0

    def seat(self, sequence: Sequence) -> None:
        """Put its wishes and history into the device's tables."""
        self._sampler.seat(sequence)

    def launch(self, logits: Tensor, sequences: list[Sequence], late: list[int]) -> Drawn:
        """Launch, and begin to copy the tokens back."""
        count = len(sequences)
        greedy = self._sampler.prepare(sequences, late)
        drawn = self._sampler.draw(logits, greedy=greedy)[:count]
        self._turn = 1 - self._turn
        tokens = self._tokens[self._turn, :count]
        tokens.copy_(drawn, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        done.record()
        return _Coming(tokens, done, self._logprobs(logits, drawn, sequences))

    def _logprobs(self, logits: Tensor, drawn: Tensor, sequences: list[Sequence]) -> dict[int, SampledToken]:
        """By row, for those who asked; waits for the device if anybody did."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.wants_logprobs]
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
