"""What one step will do, decided by the scheduler and carried out by the runner.

Knows sequences and numbers; no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from services.decoder.engine.sequence import Sequence
from services.decoder.kv.hot_class import Resize


class Chunk(NamedTuple):
    """Tokens `start` to `end` - 1 of a sequence's prompt."""

    sequence: Sequence
    start: int
    end: int


class NewPages(NamedTuple):
    """Pages that joined a row: its `first`-th and following."""

    row: int
    first: int
    host_pages: list[int]
    device_pages: list[int]


@dataclass(slots=True)
class StepPlan:
    """Applied in this order: rows leave, are resized, pages join and load, rows are seated, tokens run."""

    left_rows: list[int] = field(default_factory=list)
    resizes: list[Resize] = field(default_factory=list)  # who loses comes before whoever gains by it
    new_pages: list[NewPages] = field(default_factory=list)
    # (host page, device page) of pages that hold tokens already, found in the store or kept while parked:
    # their index loads, and in full mode their KV.
    loads: list[tuple[int, int]] = field(default_factory=list)
    # Sequences whose prompt was found whole, and more, or that were parked in mid-answer: they get hot slots
    # now and decode from the next step.
    seats: list[Sequence] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    # Planned while the step before is still running: each sequence has a token more than its books say, and
    # the device alone knows which.
    ahead: bool = False

    cached_tokens: int = 0  # of prompts admitted in this step, found in the store

    @property
    def sequences(self) -> list[Sequence]:
        """Whoever is in it."""
        return [*self.decodes, *self.seats, *(chunk.sequence for chunk in self.chunks)]

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(end - start for _, start, end in self.chunks)

    @property
    def seated_rows(self) -> list[tuple[int, int]]:
        """Rows that have hot slots in the step, or get them by it, and the tokens that they come to."""
        rows = [(sequence.row, sequence.computed + 1 + int(self.ahead)) for sequence in self.decodes]
        rows += [(sequence.row, sequence.computed + 1) for sequence in self.seats]
        rows += [(sequence.row, end + 1) for sequence, _, end in self.chunks if end == len(sequence.prompt)]
        return [(row, tokens) for row, tokens in rows if row is not None]
