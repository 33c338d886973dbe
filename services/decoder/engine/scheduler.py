"""Who runs in the next step: admission, chunked prefill beside decode, preemption.

Pure Python: knows counts of rows and pages, no tensors and no time. The rules, and why: docs/decisions/0013.

    room      a running sequence that needs a page gets it: from parked ones, then from running ones behind it
    victim    of these the least urgent, then youngest, that was not resumed a moment ago, if there is one
    parked    short of rows or device pages, a victim keeps its host pages; short of host pages it loses them
    urgent    who waits takes a row from running ones of lower priority, never from an equal
    passed    who does not fit now is passed by a few that do, then the queue waits for it

The most urgent running sequence can always go on, because all others can be made to wait and one alone always
fits (checked at submission). So somebody always ends, and then whoever waits first is the most urgent.
"""

from __future__ import annotations

from services.contract.errors import InvalidRequest, NoRoom, Unavailable
from services.decoder.engine.admission import Admission, join
from services.decoder.engine.capacity_book import CapacityBook
from services.decoder.engine.host_pages import HostPage, HostPages
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import PageDesk
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.room import Pages, Room
from services.decoder.engine.roster import Roster
from services.decoder.engine.sequence import Finish, SampledToken, Sequence
from services.decoder.engine.step_plan import NewPages, StepPlan
from services.decoder.kv.device_pages import DevicePages

_Needs = list[tuple[Sequence, int]]  # host pages that each sequence of a step lacks


class Scheduler:
    """Decides steps; the roster keeps the books."""

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
        self._desk = PageDesk(host, hasher, limits.page_tokens)
        self._device = device
        self.hot = hot or CapacityBook()
        self._roster = Roster(limits, self._desk, device, self.hot)
        self._admission = Admission(limits, self._desk, self._roster)

    @property
    def waiting(self) -> list[Sequence]:
        """Those without a row, parked ones among them; most urgent first."""
        return self._roster.waiting

    @property
    def running(self) -> list[Sequence]:
        """Those with a row; most urgent first."""
        return self._roster.running

    @property
    def parkings(self) -> int:
        """Rows that were taken from sequences which kept their host pages."""
        return self._roster.parkings

    @property
    def releases(self) -> int:
        """Times that a sequence lost its host pages."""
        return self._roster.releases

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
        if len(self.waiting) + len(sequences) > self.limits.max_waiting + self._roster.free_rows:
            raise NoRoom(f"{len(self.waiting)} choices are waiting already; try again later")
        self._roster.enqueue(sequences)

    def abort(self, request_id: str, choices: set[int]) -> list[Sequence]:
        """End some choices (all, if none are named); returns those that were still alive."""
        everyone = [*self.waiting, *self.running]
        ended = [s for s in everyone if s.request_id == request_id and (not choices or s.choice in choices)]
        for sequence in ended:
            sequence.finish = Finish.ABORT
            self._roster.retire(sequence)
        return ended

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, giving pages back included."""
        return bool(self.waiting or self.running or self._roster.left_rows or self._desk.has_work)

    def plan(self) -> StepPlan:
        """Decide the next step and take the pages that it needs, in one exchange with the store.

        Raises:
            Unavailable: the store is out of reach, or another of its clients was quicker. Nothing was
                computed, and the call may be repeated.
        """
        if self._desk.has_seals and (self._may_admit() or self._desk.free < len(self.running)):
            # Whoever is admitted now finds what was just computed, and what is sealed can be given back.
            self._desk.exchange(0)
        plan = self._choose()
        if self.waiting and not (self.running or self._desk.has_work):
            self._desk.look()  # nobody else here asks the store, and other engines may give pages back
        needs = [(sequence, self._roster.lacking(sequence, end).host) for sequence, end in _ends(plan)]
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
            or self._roster.left_rows
            or len(rows) != len(self.running)
            or self._may_admit()
        ):
            return None
        for sequence in rows:
            # A token that is told with log probabilities is waited for anyway.
            if len(sequence.generated) + 1 >= sequence.max_tokens or sequence.sampling.wants_logprobs:
                return None
        ends = ((sequence.row, sequence.computed + 2) for sequence in rows)
        if self.hot.is_due((row, end) for row, end in ends if row is not None):
            return None
        needs = [(sequence, self._roster.lacking(sequence, sequence.computed + 2).host) for sequence in rows]
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
        busy = [*decodes, *(chunk.sequence for chunk in plan.chunks)]
        for sequence in busy:
            self._desk.seal_full_pages(sequence)
        for sequence in busy:
            if sequence.is_prefilling:
                continue
            assert sequence.row is not None
            fresh = sequence.book(sampled.get(sequence.row))
            if fresh or sequence.finish:
                news.append((sequence, fresh))
            if sequence.finish:
                self._roster.retire(sequence)
        return news

    def seal_now(self) -> None:
        """Have what is computed sealed, instead of with the next step.

        Raises:
            Unavailable, PagesLost: as HostPages says.
        """
        if self._desk.has_seals:
            self._desk.exchange(0)

    def fail(self, sequence: Sequence, reason: str, finish: Finish = Finish.ERROR) -> None:
        """End one sequence with an error."""
        sequence.finish, sequence.error = finish, reason
        self._roster.retire(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row and page is owned as often as it was taken, or free."""
        self._roster.check_integrity()

    def _may_admit(self) -> bool:
        return self._admission.is_worth_trying(Room(self._desk.free, self._device.free))

    def _choose(self) -> StepPlan:
        """Urgent newcomers first, then decodes, then chunks of running prompts, then the queue."""
        plan = StepPlan()
        room = Room(self._desk.free, self._device.free)
        self._admission.admit_urgent(room)
        self._continue([sequence for sequence in self.running if not sequence.is_prefilling], plan, room)
        self._continue([sequence for sequence in self.running if sequence.is_prefilling], plan, room)
        self._admission.admit(plan, room)
        if self.waiting and not self.running and self.waiting[0].is_parked:
            # Even alone it lacks pages, so another engine has them, which may be waiting for these.
            self._roster.release(self.waiting[0])
        return plan

    def _continue(self, sequences: list[Sequence], plan: StepPlan, room: Room) -> None:
        """Plan running ones, each with the pages that it lacks; who finds no room waits."""
        for sequence in sequences:
            if sequence.row is None:
                continue  # made to wait a moment ago
            plain = sequence.device_pages and not sequence.is_prefilling
            need = self._roster.lacking(
                sequence, sequence.computed + 1 if plain else sequence.admission_tokens
            )
            if self._find_room(sequence, need, room, plan) and join(plan, sequence, self.limits):
                room.spend(need)

    def _find_room(self, sequence: Sequence, need: Pages, room: Room, plan: StepPlan) -> bool:
        """Make room for a running one, at the expense of others or else of itself."""
        while not room.fits(need):
            host_is_short = need.host > room.host
            if host_is_short and (parked := self._roster.parked):
                room.gain(self._roster.release(parked[-1]))
                continue
            behind = [one for one in self.running if one.rank > sequence.rank and one not in plan.sequences]
            bare = [one for one in behind if not one.is_sheltered]
            victim = [sequence, *behind, *bare][-1]
            room.gain(self._roster.park(victim))
            if victim is sequence:
                if host_is_short:  # with its pages, it might wait for an engine that waits for them
                    room.gain(self._roster.release(sequence))
                return False
        return True

    def _commit(self, plan: StepPlan, needs: _Needs, pages: list[HostPage]) -> StepPlan:
        plan.left_rows, self._roster.left_rows = self._roster.left_rows, []
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
            computed = -(-sequence.computed // self.limits.page_tokens) - first
            if computed > 0:  # found in the store, or kept while it was parked
                plan.loads += zip(host[:computed], device[:computed], strict=True)
                plan.cached_tokens += 0 if sequence.sheltered_until else sequence.cached
        return plan


def _ends(plan: StepPlan) -> list[tuple[Sequence, int]]:
    """Each sequence of the step, and the tokens that its pages must hold after it."""
    ends = [(sequence, sequence.computed + 1) for sequence in plan.decodes]
    ends += [(sequence, sequence.admission_tokens) for sequence in plan.seats]
    return ends + [
        (sequence, end if sequence.device_pages else sequence.admission_tokens)
        for sequence, _, end in plan.chunks
    ]
