"""Who runs in the next step: admission, chunked prefill beside decode, preemption.

Pure Python: knows counts of rows and pages, no tensors and no time.

Every sequence is in exactly one place: `waiting`, `running`, or gone. A running one owns a row, and host
and device pages for every token it has computed; a waiting one owns nothing. The oldest running sequence
can always go on, because any other can be made to wait and one alone always fits (checked at submission).
"""

from __future__ import annotations

from bisect import insort

from services.contract.errors import InvalidRequest, NoRoom, Unavailable
from services.decoder.engine.capacity_book import CapacityBook
from services.decoder.engine.host_pages import HostPage, HostPages
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import PageDesk
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.room import Room
from services.decoder.engine.sequence import Finish, SampledToken, Sequence
from services.decoder.engine.step_plan import NewPages, StepPlan
from services.decoder.kv.device_pages import DevicePages

_Needs = list[tuple[Sequence, int]]  # host pages that each sequence of a step lacks


class Scheduler:
    """Decides steps and keeps the books of rows and pages."""

    def __init__(
        self,
        limits: Limits,
        host: HostPages,
        device: DevicePages,
        hasher: PageHasher | None = None,
        hot: CapacityBook | None = None,
    ) -> None:
        """Without a `hasher` no prefix is looked for or left behind; without `hot` slots are not counted."""
        self.limits = limits
        self.waiting: list[Sequence] = []  # most urgent first
        self.running: list[Sequence] = []  # most urgent first
        self.preemptions = 0
        self._desk = PageDesk(host, hasher, limits.page_tokens)
        self._device = device
        self.hot = hot or CapacityBook()
        self._free_rows = list(range(limits.max_rows - 1, -1, -1))
        self._left_rows: list[int] = []
        self._arrivals = 0

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue the choices of one request, all or none.

        Raises:
            InvalidRequest: one can never run, or so many can never wait; the message says the limit.
            NoRoom: the queue is full.
        """
        for sequence in sequences:
            self.limits.check_possible(sequence, self._desk.total, self._device.count)
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
        everyone = [*self.waiting, *self.running]
        ended = [s for s in everyone if s.request_id == request_id and (not choices or s.choice in choices)]
        for sequence in ended:
            sequence.finish = Finish.ABORT
            self._retire(sequence)
        return ended

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, giving pages back included."""
        return bool(self.waiting or self.running or self._left_rows or self._desk.has_work)

    def plan(self) -> StepPlan:
        """Decide the next step and take the pages that it needs, in one exchange with the store.

        Raises:
            Unavailable: the store is out of reach, or another of its clients was quicker. Nothing was
                computed, and the call may be repeated.
        """
        if self.waiting and self._free_rows and self._desk.has_seals:
            self._desk.exchange(0)  # so that whoever is admitted now finds what was just computed
        plan = self._choose()
        needs = [(sequence, self._need(sequence, end)[0]) for sequence, end in self._ends(plan)]
        pages = self._desk.exchange(sum(count for _, count in needs))
        if pages is None:
            raise Unavailable("another client of the store took the pages first")
        self._commit(plan, needs, pages)
        plan.resizes = self.hot.rebalance(plan.seated_rows)
        return plan

    def plan_ahead(self, running: StepPlan) -> StepPlan | None:
        """The step after one that is still running, if it is sure to be the same rows again.

        Nothing is given back and nobody is admitted, for what runs may still write its rows' pages; a row
        whose token turns out to end it computes once in vain. None where `plan` must decide, after `apply`.

        Raises:
            Unavailable: as `plan`.
        """
        rows = running.decodes
        if (
            running.chunks
            or not rows
            or self._desk.gives_back
            or self._left_rows
            or len(rows) != len(self.running)
        ):
            return None
        if self.waiting and self._free_rows:
            return None
        for sequence in rows:
            # A token that is told with log probabilities is waited for anyway.
            if len(sequence.generated) + 1 >= sequence.max_tokens or sequence.sampling.wants_logprobs:
                return None
        if self.hot.is_due((row, tokens + 1) for row, tokens in running.seated_rows):
            return None
        needs = [(sequence, self._need(sequence, sequence.computed + 2)[0]) for sequence in rows]
        want = sum(count for _, count in needs)
        if want > min(self._desk.free, self._device.free):
            return None
        pages = self._desk.exchange(want)
        if pages is None:
            return None
        return self._commit(StepPlan(decodes=list(rows), ahead=True), needs, pages)

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
            self._desk.seal_full_pages(sequence)
        for sequence in [*decodes, *(chunk.sequence for chunk in plan.chunks)]:
            if sequence.is_prefilling:
                continue
            assert sequence.row is not None
            fresh = sequence.book(sampled.get(sequence.row))
            if fresh or sequence.finish:
                news.append((sequence, fresh))
            if sequence.finish:
                self._retire(sequence)
        return news

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
            pages = len(sequence.host_pages)  # found ones wait for the admission's exchange
            assert len(sequence.device_pages) in (pages, pages - sequence.sealed)
            assert sequence.computed <= len(sequence.host_pages) * self.limits.page_tokens
        self._device.check_integrity()
        self.hot.check_integrity()

    @staticmethod
    def _ends(plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Each sequence of the step, and the tokens that its pages must hold after it."""
        ends = [(sequence, sequence.computed + 1) for sequence in plan.decodes]
        ends += [(sequence, sequence.admission_tokens) for sequence in plan.seats]
        return ends + [
            (sequence, end if sequence.device_pages else sequence.admission_tokens)
            for sequence, _, end in plan.chunks
        ]

    def _choose(self) -> StepPlan:
        """Decodes first, then chunks of running prompts, then new ones; preempts where pages are short."""
        plan = StepPlan()
        room = Room(self._desk.free, self._device.free)
        for sequence in [s for s in self.running if not s.is_prefilling]:
            if sequence.row is None:
                continue  # preempted a moment ago
            end = sequence.computed + 1
            while not room.fits(self._need(sequence, end)) and self.running[-1] is not sequence:
                room.gain(self._preempt(self.running[-1]))
            if not room.fits(self._need(sequence, end)):
                room.gain(self._preempt(sequence))
                continue
            room.spend(self._need(sequence, end))
            # Without device pages it was admitted, and the exchange failed: it is not seated yet.
            (plan.decodes if sequence.device_pages else plan.seats).append(sequence)
        for sequence in [s for s in self.running if s.is_prefilling]:
            # Nothing is lacking but where an exchange failed right after the admission.
            need = self._need(sequence, sequence.admission_tokens)
            if not room.fits(need):
                room.gain(self._preempt(sequence))
                continue
            chunk = self.limits.next_chunk(sequence, self.limits.max_step_tokens - plan.tokens)
            if chunk is not None:
                room.spend(need)
                plan.chunks.append(chunk)
        while (
            self.waiting
            and self._free_rows
            and self._admit(self.waiting[0], plan, room, self.limits.max_step_tokens - plan.tokens)
        ):
            pass
        return plan

    def _need(self, sequence: Sequence, end: int) -> tuple[int, int]:
        """Host and device pages that are lacking for `end` tokens."""
        pages = -(-end // self.limits.page_tokens)
        return max(0, pages - len(sequence.host_pages)), max(0, pages - len(sequence.device_pages))

    def _admit(self, sequence: Sequence, plan: StepPlan, room: Room, budget: int) -> bool:
        """Seat the first in the queue, if there is room for it."""
        siblings = [one for one in self.running if one.request_id == sequence.request_id]
        if self._desk.shares and any(one.is_prefilling for one in siblings):
            return False  # the choices of a request share its prompt; the first computes it
        if not self.hot.fits(sequence.reach):
            return False
        matched = self._desk.match(sequence)
        room.host -= len(matched)  # they were free, or somebody else's anyway
        sequence.host_pages, sequence.sealed = matched, len(matched)
        sequence.find(len(matched) * self.limits.page_tokens)
        host, device = self._need(sequence, sequence.admission_tokens)
        spare = len(self.running)  # each running row may want a page soon
        chunk = self.limits.next_chunk(sequence, budget)
        possible = chunk is not None or not sequence.is_prefilling
        if not possible or not room.fits((host + spare, device + spare)):
            self._desk.give(matched)
            room.host += len(matched)
            sequence.host_pages = []
            sequence.rewind()
            return False
        room.spend((host, device))
        del self.waiting[0]
        sequence.row = self._free_rows.pop()
        self.hot.admit(sequence.row, sequence.reach)
        insort(self.running, sequence, key=lambda seated: seated.rank)
        if chunk is None:
            plan.seats.append(sequence)
        else:
            plan.chunks.append(chunk)
        return True

    def _commit(self, plan: StepPlan, needs: _Needs, pages: list[HostPage]) -> StepPlan:
        plan.left_rows, self._left_rows = self._left_rows, []
        for sequence, count in needs:
            if not count and len(sequence.device_pages) == len(sequence.host_pages):
                continue
            assert sequence.row is not None
            sequence.host_pages += pages[:count]
            pages = pages[count:]
            first = len(sequence.device_pages)
            device = self._device.take(len(sequence.host_pages) - first)
            assert device is not None, "the scheduler promised more device pages than there are"
            sequence.device_pages += device
            host = [page.page for page in sequence.host_pages[first:]]
            plan.new_pages.append(NewPages(sequence.row, first, host, device))
            found = sequence.sealed - first
            if found > 0:
                plan.loads += zip(host[:found], device[:found], strict=True)
                plan.cached_tokens += sequence.cached
        return plan

    def _preempt(self, sequence: Sequence) -> tuple[int, int]:
        """Make a running sequence wait; returns how many host and device pages came free."""
        pages = len(sequence.host_pages), len(sequence.device_pages)
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
        self._desk.give(sequence.host_pages)
        self._device.give_back(sequence.device_pages)
        self.hot.leave(sequence.row)
        self._left_rows.append(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row, sequence.host_pages, sequence.device_pages = None, [], []
