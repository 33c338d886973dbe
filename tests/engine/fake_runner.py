"""A model without tensors: the next token is a hash of all tokens before it. Pure Python.

It keeps what a real runner's memory would hold - which token each page was computed with - so that a token
fed at a wrong position, into a wrong page, or read from a page of another shows at once. As on a stream,
what was launched first is done first; but it may be under way until it is collected, and what it names must
stay where it is until then.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.limits import Limits
from services.decoder.engine.sequence import SampledToken, Sequence, TokenIds
from services.decoder.engine.step_plan import Arrival, StepPlan

VOCAB = 50


def next_token(history: list[int], seed: int = 0) -> int:
    """What the model says after `history`; `seed` stands for the draw."""
    digest = hashlib.blake2b(repr((history, seed)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) % VOCAB


def answer(prompt: TokenIds, seed: int, max_tokens: int, stop: frozenset[int], least: int) -> list[int]:
    """The whole answer of one sequence, alone in the world."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(next_token([*prompt, *tokens], seed))
        if tokens[-1] in stop and len(tokens) > least:
            break
    return tokens


@dataclass(eq=False)
class UnderWay:
    """A step that was launched and not collected, and what it names."""

    plan: StepPlan
    rows: set[int]
    pages: Counter[HostPage]  # references: each row in it reads all of its pages
    device: set[int]
    reached: dict[Sequence, int]  # by its chunks
    draws: list[tuple[Sequence, int, list[int]]]  # whose, in which row, behind which tokens
    runner: FakeRunner
    sampled: dict[int, SampledToken] = field(default_factory=dict)
    is_complete: bool = False

    def complete(self) -> None:
        """Chunks and draw, which come when the step before may have been booked."""
        if not self.is_complete:
            self.is_complete = True
            self.runner.rest(self)

    def collect(self) -> dict[int, SampledToken]:
        self.complete()
        if self.plan.awaits and self.runner.pending:
            self.runner._arrive()
        for page, count in self.pages.items():
            assert self.runner.references(page) >= count, "a page went back while a step named it"
        self.runner.under_way.remove(self)
        return self.sampled


class FakeRunner:
    """Carries plans out and checks each against the rules that the real one relies on."""

    def __init__(
        self,
        limits: Limits,
        *,
        runs_ahead: bool = False,
        references: Callable[[HostPage], float] = lambda page: float("inf"),
        chance: random.Random | None = None,
    ) -> None:
        """`references` says how often the store has lent a page, `chance` when what is loaded comes."""
        self.chance = chance
        self.pending: list[Arrival] = []
        self.there: list[Arrival] = []
        self.limits = limits
        self.runs_ahead = runs_ahead
        self.references = references
        self.under_way: list[UnderWay] = []
        self.drawn: list[tuple[Sequence, int]] = []  # by the step launched last, in the order of its draw
        self.launched: Counter[str] = Counter()  # steps by how they were planned
        self.fed = 0  # tokens computed
        self.tables: dict[int, list[tuple[int, int]]] = {}  # row -> (host page, device page)
        self.host: dict[int, dict[int, int]] = {}  # host page -> place in it -> token
        self.device: dict[int, dict[int, int]] = {}

    @property
    def launched_ahead(self) -> int:
        return self.launched["ahead"]

    def wait(self) -> None:
        self.under_way.clear()
        while self.pending:
            self._arrive()

    def arrived(self) -> list[Arrival]:
        while self.pending and (self.chance is None or self.chance.random() < 0.3):
            self._arrive()
        told, self.there = self.there, []
        return told

    def _arrive(self) -> None:
        arrival = self.pending.pop(0)
        for host, device in arrival.loads:
            assert len(self.host[host]) == self.limits.page_tokens, "a page that is not full was found"
            assert device in arrival.sequence.device_pages, "it was given back while it was written"
            self.device[device] = dict(self.host[host])
        self.there.append(arrival)

    def launch(self, plan: StepPlan) -> UnderWay:
        if plan.tokens:
            self.launched[plan.planned.value] += 1
        assert len(self.under_way) == int(plan.ahead), "a step ahead follows one that runs, another does not"
        for step in self.under_way:
            assert step.is_complete, "a step is launched amidst another"
            self._check_apart(plan, step)
        here = self.begin(plan)
        self.under_way.append(here)
        return here

    def _check_apart(self, plan: StepPlan, step: UnderWay) -> None:
        """What a step under way names does not change hands."""
        assert not set(plan.left_rows) & step.rows, "a row is left while a step runs that names it"
        assert not [one for one in plan.sequences if one.finish], "one that has ended goes on"
        held = {pair for table in self.tables.values() for pair in table}
        joined = {
            pair
            for pages in plan.new_pages
            for pair in zip(pages.host_pages, pages.device_pages, strict=True)
        }
        taken = {device for _, device in joined - held}
        assert not taken & step.device, "a device page is taken from a step that runs"
        assert not {device for _, device in plan.loads} & step.device, "a page is loaded while it is read"

    def run(self, plan: StepPlan) -> dict[int, SampledToken]:
        """A step all at once."""
        step = self.begin(plan)
        step.complete()
        return step.sampled

    def begin(self, plan: StepPlan) -> UnderWay:
        """As engine/runner.py's launch, with lists for tensors: tables, and the decode rows."""
        assert plan.tokens <= self.limits.max_step_tokens
        for row in plan.left_rows:
            self.tables.pop(row, None)
        for row, first, host_pages, device_pages in plan.new_pages:
            table = self.tables.setdefault(row, [])
            assert len(table) == first, "pages do not join where the row's end is"
            assert len(host_pages) == len(device_pages) > 0
            table += zip(host_pages, device_pages, strict=True)
        coming = {device for arrival in self.pending for _, device in arrival.loads}
        busy = [*plan.decodes, *plan.seats, *(chunk.sequence for chunk in plan.chunks)]
        assert not coming & {page for one in busy for page in one.device_pages}, "it is not there yet"
        for arrival in plan.arrivals:
            for host, device in arrival.loads:
                assert device not in coming, "a page is loaded twice"
                coming.add(device)
                self.device[device] = {-1: -1}  # until then it holds something else
                owner = arrival.sequence
                at = owner.device_pages.index(device)
                assert owner.host_pages[at].page == host
                assert self.references(owner.host_pages[at]) >= 1
            self.pending.append(arrival)
        for host, device in plan.loads:
            owners = [row for row, table in self.tables.items() if host in [page for page, _ in table]]
            full = len(self.host[host]) == self.limits.page_tokens
            assert full or len(owners) == 1, "a page that is not full was found"
            self.device[device] = dict(self.host[host])
        owners_of: dict[int, list[int]] = {}
        for table in self.tables.values():
            for host, device in table:
                owners_of.setdefault(device, []).append(host)
        for device, hosts in owners_of.items():
            assert len(set(hosts)) == 1, "a device page is taken for two host pages"
            if len(hosts) > 1:
                full = len(self.device[device]) == self.limits.page_tokens
                assert full or device in coming, "an open device page is shared"
        written = [
            table[at // self.limits.page_tokens][0]
            for sequence, at in self._next_places(plan)
            if at // self.limits.page_tokens < len(table := self.tables[self._row(sequence)])
        ]
        assert len(set(written)) == len(written), "two rows write a page"
        for page in written:
            owners = [row for row, table in self.tables.items() if page in [host for host, _ in table]]
            assert len(owners) == 1, "a page that others read is written"
            [device] = {device for table in self.tables.values() for host, device in table if host == page}
            assert len(owners_of[device]) == 1, "a device page that others read is written"
        busy = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]
        rows = [sequence.row for sequence in busy]
        assert len(set(rows)) == len(rows)
        for sequence in plan.seats:
            assert sequence.generated, "a row was seated that has nothing to go on with"
            assert not plan.ahead, "one that goes on in mid-answer is left to a step that is not ahead"
        reached = self.under_way[-1].reached if plan.ahead else {}
        for sequence, start, end in plan.chunks:
            assert start == reached.get(sequence, sequence.computed)
            assert start % self.limits.block_tokens == 0, "a chunk starts inside a block"
            assert start < end <= len(sequence.prompt)
        draws = []
        for at, sequence in enumerate(plan.decodes):
            late = []
            if plan.ahead:  # drawn, and not in the books yet
                drawer, token = self.drawn[plan.from_draw[at]]
                assert drawer is sequence, "the token of another is fed"
                late = [token]
            behind = [*sequence.generated, *late]
            self._feed(self._row(sequence), self._place(plan, sequence), behind[-1:])
            draws.append((sequence, self._row(sequence), behind))
        ends = [one for one, _, end in plan.chunks if end == len(one.prompt)]
        return UnderWay(
            plan,
            rows={self._row(sequence) for sequence in plan.sequences},
            pages=Counter(page for sequence in plan.sequences for page in sequence.host_pages),
            device={page for sequence in plan.sequences for page in sequence.device_pages},
            reached={sequence: end for sequence, _, end in plan.chunks},
            draws=draws + [(sequence, self._row(sequence), []) for sequence in ends],
            runner=self,
        )

    def rest(self, step: UnderWay) -> None:
        """Chunks, and the draw."""
        self.drawn = []
        for sequence, start, end in step.plan.chunks:
            self._feed(self._row(sequence), start, list(sequence.prompt[start:end]))
        for sequence, row, behind in step.draws:
            step.sampled[row] = self._sample(sequence, row, behind)

    @staticmethod
    def _place(plan: StepPlan, sequence: Sequence) -> int:
        """Where a row that decodes writes: behind what is computed, or under way."""
        if not plan.ahead:
            return sequence.computed
        return max(sequence.computed + 1, len(sequence.prompt))

    def _next_places(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Each sequence of the step, and the position that it computes first."""
        decodes = [(sequence, self._place(plan, sequence)) for sequence in plan.decodes]
        return decodes + [(sequence, start) for sequence, start, _ in plan.chunks]

    def _feed(self, row: int, start: int, tokens: list[int]) -> None:
        size = self.limits.page_tokens
        table = self.tables[row]
        self.fed += len(tokens)
        for at, token in enumerate(tokens, start):
            assert at // size < len(table), "a token has no page"
            host, device = table[at // size]
            for pages, page in ((self.host, host), (self.device, device)):
                if at % size == 0:
                    pages[page] = {}
                assert len(pages[page]) == at % size, "tokens reach a page out of order"
                pages[page][at % size] = token

    def _sample(self, sequence: Sequence, row: int, behind: list[int]) -> SampledToken:
        """From what lies in the pages, not from what the sequence says; `behind` is the answer so far."""
        expected = [*sequence.prompt, *behind]
        size = self.limits.page_tokens
        history: list[int] = []
        for host, device in self.tables[row][: -(-len(expected) // size)]:
            mine = self.host[host]
            assert mine == self.device[device], "host and device pages disagree"
            history += [mine[place] for place in range(len(mine))]
        assert history == expected, "the pages hold other tokens than the sequence"
        known = sequence.known[len(behind)] if len(behind) < len(sequence.known) else None
        token = next_token(history, sequence.seed) if known is None else known
        self.drawn.append((sequence, token))
        return SampledToken(token)

    @staticmethod
    def _row(sequence: Sequence) -> int:
        assert sequence.row is not None
        return sequence.row
