"""A model without tensors: the next token is a hash of all tokens before it. Pure Python.

It keeps what a real runner's memory would hold - which token each page was computed with - so that a token
fed at a wrong position, into a wrong page, or read from a page of another shows at once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from services.decoder.engine.limits import Limits
from services.decoder.engine.sequence import SampledToken, Sequence
from services.decoder.engine.step_plan import StepPlan

VOCAB = 50


def next_token(history: list[int], seed: int = 0) -> int:
    """What the model says after `history`; `seed` stands for the draw."""
    digest = hashlib.blake2b(repr((history, seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) % VOCAB


def answer(prompt: list[int], seed: int, max_tokens: int, stop: frozenset[int], least: int) -> list[int]:
    """The whole answer of one sequence, alone in the world."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(next_token(prompt + tokens, seed))
        if tokens[-1] in stop and len(tokens) > least:
            break
    return tokens


@dataclass(frozen=True)
class Computed:
    plan: StepPlan
    sampled: dict[int, SampledToken]

    def collect(self) -> dict[int, SampledToken]:
        return self.sampled


class FakeRunner:
    """Carries plans out and checks each against the rules that the real one relies on."""

    def __init__(self, limits: Limits, *, runs_ahead: bool = False) -> None:
        self.limits = limits
        self.runs_ahead = runs_ahead
        self.drawn: dict[Sequence, int] = {}  # by the step launched last, whether or not it has been booked
        self.launched_ahead = 0
        self.fed = 0  # tokens computed
        self.tables: dict[int, list[tuple[int, int]]] = {}  # row -> (host page, device page)
        self.host: dict[int, dict[int, int]] = {}  # host page -> place in it -> token
        self.device: dict[int, dict[int, int]] = {}

    def launch(self, plan: StepPlan) -> Computed:
        self.launched_ahead += plan.ahead
        return Computed(plan, self.run(plan))

    def run(self, plan: StepPlan) -> dict[int, SampledToken]:
        """As engine/runner.py's, with lists for tensors."""
        assert plan.tokens <= self.limits.max_step_tokens
        for row in plan.left_rows:
            self.tables.pop(row, None)
        for row, first, host_pages, device_pages in plan.new_pages:
            table = self.tables.setdefault(row, [])
            assert len(table) == first, "pages do not join where the row's end is"
            assert len(host_pages) == len(device_pages) > 0
            table += zip(host_pages, device_pages, strict=True)
        for host, device in plan.loads:
            owners = [row for row, table in self.tables.items() if host in [page for page, _ in table]]
            full = len(self.host[host]) == self.limits.page_tokens
            assert full or len(owners) == 1, "a page that is not full was found"
            self.device[device] = dict(self.host[host])
        used = [device for table in self.tables.values() for _, device in table]
        assert len(set(used)) == len(used), "two rows share a device page"
        written = [
            table[at // self.limits.page_tokens][0]
            for sequence, at in self._next_places(plan)
            if at // self.limits.page_tokens < len(table := self.tables[self._row(sequence)])
        ]
        assert len(set(written)) == len(written), "two rows write a page"
        for page in written:
            owners = [row for row, table in self.tables.items() if page in [host for host, _ in table]]
            assert len(owners) == 1, "a page that others read is written"
        busy = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]
        rows = [sequence.row for sequence in busy]
        assert len(set(rows)) == len(rows)
        sampled: dict[int, SampledToken] = {}
        before, self.drawn = self.drawn, {}
        for sequence in plan.seats:
            assert sequence.generated, "a row was seated that has nothing to go on with"
        assert not (plan.ahead and (plan.chunks or plan.left_rows or plan.seats)), (
            "a row changes hands while a step runs"
        )
        for sequence in plan.decodes:
            late = [before[sequence]] if plan.ahead else []  # drawn, and not in the books yet
            self._feed(sequence, sequence.computed + len(late), [[*sequence.generated, *late][-1]])
            sampled[self._row(sequence)] = self._sample(sequence, late)
        for sequence, start, end in plan.chunks:
            assert start == sequence.computed
            assert start % self.limits.block_tokens == 0, "a chunk starts inside a block"
            assert start < end <= len(sequence.prompt)
            self._feed(sequence, start, sequence.prompt[start:end])
            if end == len(sequence.prompt):
                sampled[self._row(sequence)] = self._sample(sequence, [])
        return sampled

    @staticmethod
    def _next_places(plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Each sequence of the step, and the position that it computes first."""
        decodes = [(sequence, sequence.computed + plan.ahead) for sequence in plan.decodes]
        return decodes + [(sequence, start) for sequence, start, _ in plan.chunks]

    def _feed(self, sequence: Sequence, start: int, tokens: list[int]) -> None:
        size = self.limits.page_tokens
        table = self.tables[self._row(sequence)]
        self.fed += len(tokens)
        for at, token in enumerate(tokens, start):
            assert at // size < len(table), "a token has no page"
            host, device = table[at // size]
            for pages, page in ((self.host, host), (self.device, device)):
                if at % size == 0:
                    pages[page] = {}
                assert len(pages[page]) == at % size, "tokens reach a page out of order"
                pages[page][at % size] = token

    def _sample(self, sequence: Sequence, late: list[int]) -> SampledToken:
        """From what lies in the pages, not from what the sequence says."""
        expected = sequence.prompt + sequence.generated + late
        size = self.limits.page_tokens
        history: list[int] = []
        for host, device in self.tables[self._row(sequence)][: -(-len(expected) // size)]:
            mine = self.host[host]
            assert mine == self.device[device], "host and device pages disagree"
            history += [mine[place] for place in range(len(mine))]
        assert history == expected, "the pages hold other tokens than the sequence"
        known = sequence.next_known(len(late))
        self.drawn[sequence] = next_token(history, sequence.seed) if known is None else known
        return SampledToken(self.drawn[sequence])

    @staticmethod
    def _row(sequence: Sequence) -> int:
        assert sequence.row is not None
        return sequence.row
