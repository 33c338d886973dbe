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
from services.decoder.engine.ahead import Ahead
from services.decoder.engine.capacity_book import CapacityBook
from services.decoder.engine.host_pages import HostPages
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import MOST_GIVEN, PageDesk
from services.decoder.engine.page_hash import PageHasher
from services.decoder.engine.resident_pages import ResidentPages
from services.decoder.engine.room import Pages, Room
from services.decoder.engine.roster import Roster
from services.decoder.engine.sequence import Finish, SampledToken, Sequence
from services.decoder.engine.step_plan import Arrival, Planned, StepPlan
from services.decoder.kv.device_pages import DevicePages


class Scheduler:
    """Decides steps; the roster keeps the books."""

    def __init__(
        self,
        limits: Limits,
        host: HostPages,
        device: DevicePages,
        hasher: PageHasher | None = None,
        hot: CapacityBook | None = None,
        *,
        share_device_pages: bool = True,
        loads_beside: bool = False,
    ) -> None:
        """Without a `hasher` no prefix is looked for or left behind; without `hot` slots are not counted.

        With `loads_beside`, found pages are loaded while steps run, and `arrived` says when they are there.
        """
        self.limits = limits
        self._desk = PageDesk(host, hasher, limits.page_tokens)
        self._device = ResidentPages(device, shared=share_device_pages)
        self.hot = hot or CapacityBook()
        self._roster = Roster(limits, self._desk, self._device, self.hot)
        self._admission = Admission(limits, self._desk, self._roster, self._device, loads_beside=loads_beside)
        self._ahead = Ahead(limits, self._desk, self._device, self._roster, self._admission)
        self._under_way: StepPlan | None = None  # planned ahead, and not applied yet
        self._hindrance = Planned.IDLE  # why the next step is not planned ahead

    @property
    def waiting(self) -> list[Sequence]:
        """Those without a row, parked ones among them; most urgent first."""
        return self._roster.waiting

    @property
    def running(self) -> list[Sequence]:
        """Those with a row; most urgent first."""
        arriving = [one for one in self._roster.arriving if one.finish is None]
        return sorted([*self._roster.running, *arriving], key=lambda one: one.rank)

    @property
    def parkings(self) -> int:
        """Rows that were taken from sequences which kept their host pages."""
        return self._roster.parkings

    @property
    def releases(self) -> int:
        """Times that a sequence lost its host pages."""
        return self._roster.releases

    def prepare(self, sequences: list[Sequence]) -> None:
        """Do for newcomers, before `submit`, what would keep a step waiting; they alone are touched, so on
        any thread.
        """
        before: Sequence | None = None
        for sequence in sequences:
            if before is not None and (before.salt, before.prompt) == (sequence.salt, sequence.prompt):
                full = len(sequence.prompt) // self.limits.page_tokens
                sequence.page_hashes = before.page_hashes[:full]
            self._desk.hash_pages(sequence)
            before = sequence

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
            self._let_go(sequence)
        return ended

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, giving pages back included."""
        seated = self._roster.running or self._roster.arriving
        return bool(self.waiting or seated or self._roster.left_rows or self._desk.has_work)

    def plan(self) -> StepPlan:
        """Decide the next step and take the pages that it needs, in one exchange with the store.

        No step may be under way.

        Raises:
            Unavailable: the store is out of reach, or another of its clients was quicker. Nothing was
                computed, and the call may be repeated.
        """
        if self._desk.has_seals and (self._may_admit() or self._desk.free < len(self.running)):
            # Whoever is admitted now finds what was just computed, and what is sealed can be given back.
            self._desk.exchange(0, MOST_GIVEN if self.running else None)
        plan = self._choose()
        if self.waiting and not (self.running or self._desk.has_work):
            self._desk.look()  # nobody else here asks the store, and other engines may give pages back
        needs = self._roster.needs(plan)
        want = sum(count for _, count in needs)
        pages = self._desk.exchange(want, MOST_GIVEN if plan.tokens else None)
        if pages is None and self._desk.gives_back:
            pages = self._desk.exchange(want)  # less was free than was known, and there is more to give
        if pages is None:
            raise Unavailable("another client of the store took the pages first")
        self._roster.equip(plan, needs, pages)
        plan.resizes = self.hot.rebalance(plan.seated_rows)
        plan.awaits = bool(self._roster.arriving) and not (plan.tokens or plan.seats)
        plan.planned, self._hindrance = self._hindrance, Planned.IDLE
        return plan

    def plan_ahead(self, running: StepPlan) -> StepPlan | None:
        """The step after one that is still under way, if it can be decided without that one's tokens.

        None where `plan` must decide, after `apply`.

        Raises:
            Unavailable: as `plan`.
        """
        self._under_way, self._hindrance = None, Planned.STORE  # unless it answers
        decided = self._ahead.plan(running)
        if isinstance(decided, Planned):
            self._hindrance = decided
            return None
        self._under_way, self._hindrance = decided, Planned.IDLE
        return decided

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
        self._roster.settle()  # nothing names them any more: the step ahead was planned without them
        self._device.loaded(place for _, place in plan.loads)
        # Of a step that was planned ahead, those that have ended since computed in vain.
        chunks = [chunk for chunk in plan.chunks if chunk.sequence.finish is None]
        decodes = [sequence for sequence in plan.decodes if sequence.finish is None]
        for sequence, _, end in chunks:
            sequence.computed = end
        for sequence in decodes:
            sequence.computed += 1
        news = []
        busy = [*decodes, *(chunk.sequence for chunk in chunks)]
        for sequence in busy:
            self._desk.seal_full_pages(sequence)
            self._roster.name_pages(sequence)
        for sequence in busy:
            if sequence.is_prefilling:
                continue
            assert sequence.row is not None
            fresh = sequence.book(sampled.get(sequence.row))
            if fresh or sequence.finish:
                news.append((sequence, fresh))
            if sequence.finish:
                self._let_go(sequence)
        return news

    def arrived(self, arrivals: list[Arrival]) -> None:
        """These have been loaded beside the steps."""
        for ended in self._roster.arrived(arrivals):
            self._let_go(ended)

    def abandon(self) -> None:
        """Whatever was under way will never be applied."""
        if self._under_way is not None:  # it may never have been launched; a row may be left twice
            self._roster.left_rows = [*self._under_way.left_rows, *self._roster.left_rows]
        self._under_way = None
        self._device.forget_loads()
        self._roster.settle()

    def seal_now(self) -> None:
        """Have what is computed sealed, instead of with the next step.

        Raises:
            Unavailable, PagesLost: as HostPages says.
        """
        if self._desk.has_seals:
            self._desk.exchange(0, MOST_GIVEN)

    def fail(self, sequence: Sequence, reason: str, finish: Finish = Finish.ERROR) -> None:
        """End one sequence with an error."""
        sequence.finish, sequence.error = finish, reason
        self._let_go(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row and page is owned as often as it was taken, or free."""
        self._roster.check_integrity()

    def _let_go(self, sequence: Sequence) -> None:
        """Of one that has ended; what the step ahead names stays where it is until that one is over."""
        if sequence in self._roster.arriving:
            return  # its pages are being written, or will not be: either way when the step is booked
        if self._under_way is not None and sequence in self._under_way.sequences:
            self._roster.linger(sequence)
        else:
            self._roster.retire(sequence)

    def _may_admit(self) -> bool:
        return self._admission.is_worth_trying(Room(self._desk.free, self._device.free))

    def _choose(self) -> StepPlan:
        """Urgent newcomers first, then decodes, then chunks of running prompts, then the queue."""
        plan = StepPlan()
        room = Room(self._desk.free, self._device.free)
        self._admission.admit_urgent(room)
        running = self._roster.running
        self._continue([sequence for sequence in running if not sequence.is_prefilling], plan, room)
        self._continue([sequence for sequence in running if sequence.is_prefilling], plan, room)
        for sequence in self._roster.unequipped:  # by the plan before, on purpose or as it came to nothing
            need = self._roster.lacking(sequence, sequence.admission_tokens)
            if self._find_room(sequence, need, room, plan):
                room.spend(need)
                plan.newcomers.append(sequence)
        self._admission.admit(plan, room)
        if self.waiting and not (running or self._roster.arriving) and self.waiting[0].is_parked:
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
            behind = [one for one in self._roster.running if one.rank > sequence.rank]
            behind = [one for one in behind if one not in plan.sequences]
            bare = [one for one in behind if not one.is_sheltered]
            victim = [sequence, *behind, *bare][-1]
            if victim is sequence and any(one.rank > sequence.rank for one in self._roster.arriving):
                return False  # these give way as soon as they run
            room.gain(self._roster.park(victim))
            if victim is sequence:
                if host_is_short:  # with its pages, it might wait for an engine that waits for them
                    room.gain(self._roster.release(sequence))
                return False
        return True
