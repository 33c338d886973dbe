"""What one step will do, decided by the scheduler and carried out by the runner.

Knows sequences and numbers; no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
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


class Arrival(NamedTuple):
    """Pages, as (host page, device page), that a newcomer's prompt was found in, loaded beside the steps."""

    sequence: Sequence
    loads: list[tuple[int, int]]


class Planned(Enum):
    """Whether a step was planned while the one before it ran, or why only when that one had ended."""

    AHEAD = "ahead"
    IDLE = "idle"  # there was none before it, or the device runs none ahead
    PROMPTS = "prompts"  # no row would decode in it, so nobody waits, and who arrives meanwhile is let in
    LOGPROBS = "logprobs"  # somebody wants to be told log probabilities, which are waited for
    RESUME = "resume"  # one that had a row before, or has a part of its answer, may get one, or just did
    PRIORITY = "priority"  # one that waits may take the row of one that runs
    PREFIX = "prefix"  # one that waits may find what is being computed
    PAGES = "pages"  # there are too few, so somebody must give way
    STORE = "store"  # it was out of reach


@dataclass(slots=True)
class StepPlan:
    """Applied in this order: rows leave, are resized, pages join and load, rows are seated, tokens run."""

    left_rows: list[int] = field(default_factory=list)
    resizes: list[Resize] = field(default_factory=list)  # who loses comes before whoever gains by it
    new_pages: list[NewPages] = field(default_factory=list)
    # (host page, device page) of pages that hold tokens already, found in the store or kept while parked:
    # their index loads, and in full mode their KV.
    loads: list[tuple[int, int]] = field(default_factory=list)
    # Of newcomers that join a later step, when this has come.
    arrivals: list[Arrival] = field(default_factory=list)
    newcomers: list[Sequence] = field(default_factory=list)  # let in by this step, to join a later one
    awaits: bool = False  # nothing can be computed before something arrives
    # Sequences whose prompt was found whole, and more, or that were parked in mid-answer: they get hot slots
    # now and decode from the next step.
    seats: list[Sequence] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    # Ahead: the step before was still running, so each of `decodes` has a token more than its books say.
    planned: Planned = Planned.IDLE
    # Then, the place of that token in what the step before draws, which the device alone knows.
    from_draw: list[int] = field(default_factory=list)

    cached_tokens: int = 0  # of prompts admitted in this step, found in the store

    @property
    def sequences(self) -> list[Sequence]:
        """Whoever is in it."""
        return [*self.decodes, *self.seats, *(chunk.sequence for chunk in self.chunks), *self.newcomers]

    def chunk_pages(self, page_tokens: int) -> list[tuple[int, int]]:
        """(host page, device page) of every page of as many tokens that a chunk writes to."""
        return [
            (sequence.host_pages[page].page, sequence.device_pages[page])
            for sequence, start, end in self.chunks
            for page in range(start // page_tokens, -(-end // page_tokens))
        ]

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(end - start for _, start, end in self.chunks)

    @property
    def ahead(self) -> bool:
        """Whether it was planned while the step before it ran."""
        return self.planned is Planned.AHEAD

    @property
    def drawing(self) -> list[Sequence]:
        """Who gets a token, in the order of the draw: decodes, then those whose prompt ends here."""
        return [*self.decodes, *(one for one, _, end in self.chunks if end == len(one.prompt))]

    def position(self, sequence: Sequence) -> int:
        """Where the newest token of one of `decodes` stands."""
        return sequence.length - 1 + int(self.ahead)

    @property
    def ends(self) -> list[tuple[Sequence, int]]:
        """Each sequence of the step, and the tokens that its pages must hold after it."""
        ends = [(sequence, self.position(sequence) + 1) for sequence in self.decodes]
        ends += [(sequence, sequence.admission_tokens) for sequence in (*self.seats, *self.newcomers)]
        return ends + [
            (sequence, end if sequence.device_pages else sequence.admission_tokens)
            for sequence, _, end in self.chunks
        ]

    @property
    def seated_rows(self) -> list[tuple[int, int]]:
        """Rows that have hot slots in the step, or get them by it, and the tokens that they come to."""
        rows = [(sequence.row, self.position(sequence) + 1) for sequence in self.decodes]
        rows += [(sequence.row, sequence.computed + 1) for sequence in self.seats]
        rows += [(sequence.row, end + 1) for sequence, _, end in self.chunks if end == len(sequence.prompt)]
        return [(row, tokens) for row, tokens in rows if row is not None]
