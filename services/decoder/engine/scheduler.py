"""Who runs in the next step: admission, chunked prefill beside decode, preemption.

Pure Python: knows counts of rows and pages, no tensors and no time.

Every sequence is in exactly one place: `waiting`, `running`, or gone. A running one owns a row, and host
and device pages for every token it has computed; a waiting one owns nothing. The oldest running sequence
can always go on, because any other can be made to wait and one alone always fits (checked at submission).
"""

from __future__ import annotations

from bisect import insort

from services.contract.errors import InvalidRequest, NoRoom, Unavailable
from services.decoder.engine.host_pages import HostPage, HostPages
from services.decoder.engine.limits import Limits
from services.decoder.engine.sequence import Finish, SampledToken, Sequence
from services.decoder.engine.step_plan import Chunk, NewPages, StepPlan
from services.decoder.kv.device_pages import DevicePages


class Scheduler:
    """Decides steps and keeps the books of rows and pages."""

    def __init__(self, limits: Limits, host: HostPages, device: DevicePages) -> None:
        self.limits = limits
        self.waiting: list[Sequence] = []  # most urgent first
        self.running: list[Sequence] = []  # most urgent first
        self.preemptions = 0
        self._host = host
        self._device = device
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))
        self._given_up: list[HostPage] = []  # to go back with the next exchange
        self._left_rows: list[int] = []
        self._arrivals = 0

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue the choices of one request, all or none.

        Raises:
            InvalidRequest: one can never run, or so many can never wait; the message states the limit and
                the need.
            NoRoom: the queue is full.
        """
        for sequence in sequences:
            self.limits.check_possible(sequence, self._host.total, self._device.count)
        most = self.limits.max_waiting + self.limits.max_rows
        if len(sequences) > most:
            raise InvalidRequest(f"{len(sequences)} choices were asked for; this server takes at most {most}")
        if len(self.waiting) + len(sequences) > self.limits.max_waiting + len(self._free_rows):
            raise NoRoom(f"{len(self.waiting)} choices are waiting already; try again later")
        for sequence in sequences:
            sequence.arrival = self._arrivals
            self._arrivals += 1
            insort(self.waiting, sequence, key=lambda queued: queued.rank)

    def abort(self, request_id: str, choices: set[int]) -> list[Sequence]:
        """End some choices (all, if none are named); returns those that were still alive."""
        ended = [
            sequence
            for sequence in [*self.waiting, *self.running]
            if sequence.request_id == request_id and (not choices or sequence.choice in choices)
        ]
        for sequence in ended:
            sequence.finish = Finish.ABORT
            self._retire(sequence)
        return ended

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, giving pages back included."""
        return bool(self.waiting or self.running or self._given_up or self._left_rows)

    def plan(self) -> StepPlan:
        """Decide the next step and take the pages that it needs, in one exchange with the store.

        Raises:
            Unavailable: the store is out of reach, or another of its clients was quicker. Nothing was
                computed, and the call may be repeated.
        """
        chunks, decodes = self._choose()
        needs = [(sequence, self._lacking(sequence, end)) for sequence, end in self._ends(chunks, decodes)]
        want = sum(count for _, count in needs)
        pages: list[HostPage] | None = []
        if want or self._given_up:
            pages = self._host.exchange(self._given_up, want)
            self._given_up = []
        if pages is None:
            raise Unavailable("another client of the store took the pages first")
        return self._commit(chunks, decodes, needs, pages)

    def plan_ahead(self, running: StepPlan) -> StepPlan | None:
        """The step after one that is still running, if it is sure to be the same rows again.

        Nothing is given back and nobody is admitted, for what runs may still write its rows' pages; a row
        whose token turns out to end it computes once in vain. None where `plan` must decide, after `apply`.

        Raises:
            Unavailable: as `plan`.
        """
        rows = running.decodes
        if running.chunks or not rows or self._given_up or self._left_rows or len(rows) != len(self.running):
            return None
        if self.waiting and self._free_rows:
            return None
        for sequence in rows:
            # A token that is told with log probabilities is waited for anyway.
            if len(sequence.generated) + 1 >= sequence.max_tokens or sequence.sampling.wants_logprobs:
                return None
        needs = [(sequence, self._lacking(sequence, sequence.computed + 2)) for sequence in rows]
        want = sum(count for _, count in needs)
        if want > min(self._host.free, self._device.free):
            return None
        pages = self._host.exchange([], want) if want else []
        if pages is None:
            return None
        plan = self._commit([], list(rows), needs, pages)
        plan.ahead = True
        return plan

    def apply(
        self, plan: StepPlan, sampled: dict[int, SampledToken]
    ) -> list[tuple[Sequence, list[SampledToken]]]:
        """Book what a step computed.

        Args:
            plan: the step that ran.
            sampled: by row, the token that was drawn (or replayed) for it; a sequence that is due one and
                has none ends with an error.

        Returns:
            sequences with tokens that the client has not seen, or that ended.
        """
        for sequence, _, end in plan.chunks:
            sequence.computed = end
        # Of a step that was planned ahead, those that have ended since computed in vain.
        decodes = [sequence for sequence in plan.decodes if sequence.finish is None]
        for sequence in decodes:
            sequence.computed += 1
        news = []
        for sequence in [*decodes, *(chunk.sequence for chunk in plan.chunks)]:
            if sequence.is_prefilling:
                continue
            assert sequence.row is not None
            fresh = self._book(sequence, sampled.get(sequence.row))
            if fresh or sequence.finish:
                news.append((sequence, fresh))
            if sequence.finish:
                self._retire(sequence)
        return news

    @staticmethod
    def _book(sequence: Sequence, token: SampledToken | None) -> list[SampledToken]:
        """Take a token; returns what of it is new to the client."""
        if token is None:
            sequence.finish, sequence.error = Finish.ERROR, "the model's output is not a number"
        elif sequence.max_tokens == 0:
            sequence.finish = Finish.LENGTH
        else:
            sequence.take(token.token)
            if len(sequence.generated) > sequence.reported:
                sequence.reported += 1
                return [token]
        return []

    def fail(self, sequence: Sequence, reason: str) -> None:
        """End one sequence with an error."""
        sequence.finish, sequence.error = Finish.ERROR, reason
        self._retire(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row and device page is owned exactly once or free."""
        rows = [sequence.row for sequence in self.running]
        assert None not in rows, "a running sequence has no row"
        assert sorted([*self._free_rows, *(row for row in rows if row is not None)]) == list(
            range(self.limits.max_rows)
        ), "rows lost or owned twice"
        assert all(s.row is None and not s.host_pages and not s.device_pages for s in self.waiting)
        held = sum(len(sequence.device_pages) for sequence in self.running)
        assert held + self._device.free == self._device.count, "device pages lost"
        for sequence in self.running:
            assert len(sequence.host_pages) == len(sequence.device_pages)
            assert sequence.computed <= len(sequence.host_pages) * self.limits.page_tokens
        self._device.check_integrity()

    def _lacking(self, sequence: Sequence, end: int) -> int:
        return max(0, -(-end // self.limits.page_tokens) - len(sequence.host_pages))

    def _ends(self, chunks: list[Chunk], decodes: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Each sequence of the step, and the tokens that its pages must hold after it."""
        return [(sequence, sequence.computed + 1) for sequence in decodes] + [
            (sequence, self._admission_tokens(sequence) if start == 0 else end)
            for sequence, start, end in chunks
        ]

    @staticmethod
    def _admission_tokens(sequence: Sequence) -> int:
        """A sequence starts with room for all it must compute before its first new token, and for that
        one if there is to be any: never more than `Limits.check_possible` counted.
        """
        return len(sequence.prompt) + min(len(sequence.known) + 1, sequence.max_tokens)

    def _admission_pages(self, sequence: Sequence) -> int:
        return self._lacking(sequence, self._admission_tokens(sequence))

    def _choose(self) -> tuple[list[Chunk], list[Sequence]]:
        """Decodes first, then chunks of running prompts, then new ones; preempts where pages are short."""
        free = min(self._host.free + len(self._given_up), self._device.free)
        decodes: list[Sequence] = []
        for sequence in [s for s in self.running if not s.is_prefilling]:
            if sequence.row is None:
                continue  # preempted a moment ago
            need = self._lacking(sequence, sequence.computed + 1)
            while need > free and self.running[-1] is not sequence:
                free += self._preempt(self.running[-1])
            if need > free:
                free += self._preempt(sequence)
                continue
            free -= need
            decodes.append(sequence)
        budget = self.limits.max_step_tokens - len(decodes)
        chunks = []
        for sequence in [s for s in self.running if s.is_prefilling]:
            # Nothing is lacking but where an exchange failed right after the admission.
            need = 0 if sequence.host_pages else self._admission_pages(sequence)
            if need > free:
                free += self._preempt(sequence)
                continue
            chunk = self._chunk(sequence, budget)
            if chunk is not None:
                free -= need
                chunks.append(chunk)
                budget -= chunk.end - chunk.start
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            need = self._admission_pages(sequence)
            spare = len(self.running)  # each running row may want a page soon
            chunk = self._chunk(sequence, budget)
            if chunk is None or (need + spare > free and self.running) or need > free:
                break
            free -= need
            budget -= chunk.end - chunk.start
            chunks.append(chunk)
            del self.waiting[0]
            sequence.row = self._free_rows.pop()
            insort(self.running, sequence, key=lambda seated: seated.rank)
        return chunks, decodes

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        """The next run of a prompt: to its end, or to a block's edge."""
        end = min(len(sequence.prompt), sequence.computed + budget)
        if end < len(sequence.prompt):
            end -= end % self.limits.block_tokens
        return Chunk(sequence, sequence.computed, end) if end > sequence.computed else None

    def _commit(
        self,
        chunks: list[Chunk],
        decodes: list[Sequence],
        needs: list[tuple[Sequence, int]],
        pages: list[HostPage],
    ) -> StepPlan:
        plan = StepPlan(left_rows=self._left_rows, decodes=decodes, chunks=chunks)
        self._left_rows = []
        for sequence, count in needs:
            if not count:
                continue
            assert sequence.row is not None
            mine, pages = pages[:count], pages[count:]
            device = self._device.take(count)
            assert device is not None, "the scheduler promised more device pages than there are"
            first = len(sequence.host_pages)
            plan.new_pages.append(NewPages(sequence.row, first, [page.page for page in mine], device))
            sequence.host_pages += mine
            sequence.device_pages += device
        return plan

    def _preempt(self, sequence: Sequence) -> int:
        """Make a running sequence wait; returns how many pages came free."""
        pages = len(sequence.host_pages)
        self.preemptions += 1
        self._unseat(sequence)
        sequence.rewind()
        insort(self.waiting, sequence, key=lambda queued: queued.rank)
        return pages

    def _retire(self, sequence: Sequence) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence.row is not None:
            self._unseat(sequence)

    def _unseat(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self.running.remove(sequence)
        self._given_up += sequence.host_pages
        self._device.give_back(sequence.device_pages)
        self._left_rows.append(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row, sequence.host_pages, sequence.device_pages = None, [], []
