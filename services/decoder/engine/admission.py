"""Who of those that wait gets a row: the queue's order, who may be passed, and at whose expense.

Knows counts of rows and pages. What is taken from whom, and why: docs/decisions/0013.
"""

from __future__ import annotations

from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import PageDesk
from services.decoder.engine.resident_pages import ResidentPages
from services.decoder.engine.room import Chances, Pages, Room
from services.decoder.engine.roster import Roster
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import Chunk, StepPlan

MOST_PASSED = 8
"""Choices that may get a row before one that waited ahead of them, and how far a step looks down it."""

MANY_PAGES = 500
"""That a step which decodes asks the store for, gives rows, or was left with, before it leaves further work
to the next one: one to two ms of the host.
"""


def chunk_beside(plan: StepPlan, sequence: Sequence, limits: Limits) -> Chunk | None:
    """What a step can compute of a prompt beside what is planned."""
    return limits.next_chunk(sequence, plan)


def join(plan: StepPlan, sequence: Sequence, limits: Limits) -> bool:
    """Plan what a row computes next; False if the step has no tokens left for it."""
    if not sequence.is_prefilling:
        # Without device pages it was admitted, and is not seated yet.
        (plan.decodes if sequence.device_pages else plan.seats).append(sequence)
        return True
    chunk = chunk_beside(plan, sequence, limits)
    if chunk is not None:
        plan.chunks.append(chunk)
    return chunk is not None


class Admission:
    """Puts those who get a row into the step's plan."""

    def __init__(
        self, limits: Limits, desk: PageDesk, roster: Roster, device: ResidentPages, *, loads_beside: bool
    ) -> None:
        self._loads_beside = loads_beside
        self._limits = limits
        self._desk = desk
        self._roster = roster
        self._device = device
        self._asked = 0  # pages, of the store, in this step

    def is_worth_trying(self, room: Room) -> bool:
        """Whether somebody may get a row now who did not the last time."""
        for place, sequence in enumerate(self._roster.waiting[: MOST_PASSED + 1]):
            victims = [] if place else self.victims(sequence)
            has_row = self._roster.free_rows > 0 or bool(victims)
            if has_row and self._may_fit(sequence, self._chances(room, victims)):
                return True
            if sequence.passed >= MOST_PASSED:
                break
        return False

    def admit_urgent(self, room: Room) -> None:
        """Give rows to those who may take them from running ones; the step's planning finds them running.

        Their pages stay in `room`, beside one for every other row.
        """
        waiting, kept = self._roster.waiting, Pages(0, 0)
        while waiting and (victims := self.victims(waiting[0])):
            sequence = waiting[0]
            if not self._admit(sequence, room, victims):
                break
            need = self._roster.lacking(sequence, sequence.admission_tokens)
            kept = Pages(kept.host + need.host, kept.device + need.device)
        room.gain(kept)

    def admit(self, plan: StepPlan, room: Room, *, only_short: bool = False) -> int:
        """Let those in whom there is room for, as they come; who was passed too often holds the queue up.

        Args:
            plan: they join it.
            room: pages that they may take.
            only_short: as far as the first of whose prompt the store is asked for many pages.

        Returns:
            pages that the store was asked for.
        """
        passed: list[Sequence] = []
        self._asked = 0
        for sequence in list(self._roster.waiting):
            if not self._roster.free_rows or len(passed) == MOST_PASSED:
                break
            if plan.decodes and self._asked > MANY_PAGES:
                break  # in the next step, for some would wait for this one
            if only_short and self._desk.most_found(sequence) > MANY_PAGES:
                break
            waits = self._loads_beside and not sequence.has_run
            if self._has_tokens(sequence, plan) and self._admit(sequence, room, [], waits=waits):
                if waits and sequence.is_prefilling and self._roster.expect(sequence):
                    plan.newcomers.append(sequence)
                else:
                    join(plan, sequence, self._limits)
                for one in passed:
                    one.passed += 1
            elif sequence.passed >= MOST_PASSED:
                break
            else:
                passed.append(sequence)
        return self._asked

    def victims(self, sequence: Sequence) -> list[Sequence]:
        """Running ones whose row one that waits may take, most urgent first."""
        running = self._roster.running
        return [one for one in running if one.priority > sequence.priority and not one.is_sheltered]

    def takers(self, plan: StepPlan) -> list[Sequence]:
        """Of those whom `admit` may look at, who could compute something beside what is planned."""
        inspected = self._roster.waiting[: self._roster.free_rows + MOST_PASSED]
        return [sequence for sequence in inspected if self._has_tokens(sequence, plan)]

    def _has_tokens(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Whether the step can compute anything of it; one in mid-answer needs none of the step's tokens."""
        return not sequence.is_prefilling or chunk_beside(plan, sequence, self._limits) is not None

    def _admit(self, sequence: Sequence, room: Room, victims: list[Sequence], *, waits: bool = False) -> bool:
        """Give one that waits a row, if there is room or some can be made at the victims' expense."""
        seated = (*self._roster.running, *self._roster.arriving)
        siblings = [one for one in seated if one.request_id == sequence.request_id and one.finish is None]
        if self._desk.shares and any(one.is_prefilling for one in siblings):
            return False  # the choices of a request share its prompt; the first computes it
        chances = self._chances(room, victims)
        if not self._may_fit(sequence, chances):
            return False
        need, matched = self._roster.lacking(sequence, sequence.admission_tokens), []
        if not sequence.is_parked:
            self._desk.hash_pages(sequence)
            found = min(need.host, self._desk.most_found(sequence))
            there = self._device.expected(sequence.page_hashes[:found])
            least = Pages(need.host - found, need.device - there)
            # Where nobody runs, what is known to be free may be out of date, and a match tells.
            if self._roster.running and not self._is_enough(sequence, least, room, victims):
                sequence.refused = chances
                return False  # whatever a match might find
            matched = self._match(sequence, room)
        self._roster.share(sequence, waits=waits and sequence.is_prefilling)
        need = self._roster.lacking(sequence, sequence.admission_tokens)
        if not self._clear(sequence, need, room, victims):
            sequence.refused = chances
            room.gain(self._roster.unshare(sequence))
            if matched:
                room.host += self._desk.give(matched)
                sequence.host_pages = []
                sequence.rewind()
            return False
        room.spend(need)
        self._roster.seat(sequence)
        return True

    def _match(self, sequence: Sequence, room: Room) -> list[HostPage]:
        """Begin with what is in the store."""
        before = self._desk.free
        self._asked += self._desk.most_found(sequence)
        matched = self._desk.match(sequence)
        room.host -= before - self._desk.free
        sequence.host_pages, sequence.sealed = matched, len(matched)
        sequence.find(len(matched) * self._limits.page_tokens)
        return matched

    def _clear(self, sequence: Sequence, need: Pages, room: Room, victims: list[Sequence]) -> bool:
        """Make room for one that waits, at the expense of victims and of parked ones behind it, or not.

        Beside what it needs, each row that goes on running may want a page soon.
        """
        if not self._is_enough(sequence, need, room, victims):
            return False
        victims, running, hot = list(victims), self._roster.running, self._roster.hot
        behind = self._behind(sequence)
        while True:
            wanted = need.and_each(len(running) + len(self._roster.arriving))
            if self._roster.free_rows and room.fits(wanted) and hot.fits(sequence.reach):
                return True
            if behind and wanted.host > room.host:
                room.gain(self._roster.release(behind.pop()))
            elif victims:
                behind.append(victims.pop())
                room.gain(self._roster.park(behind[-1]))
            else:
                return False  # pages that were counted twice are shared

    def _is_enough(self, sequence: Sequence, need: Pages, room: Room, victims: list[Sequence]) -> bool:
        """Whether `_clear` could make so much room if all that it may take came free."""
        running = self._roster.running
        host = room.host + sum(len(one.host_pages) for one in (*self._behind(sequence), *victims))
        device = room.device + self._device.freed_by(page for one in victims for page in one.places)
        rows = [one.row for one in victims if one.row is not None]
        least = need.and_each(len(running) + len(self._roster.arriving) - len(victims))
        fits = least.host <= host and least.device <= device
        return fits and self._roster.hot.fits(sequence.reach, without=rows)

    def _behind(self, sequence: Sequence) -> list[Sequence]:
        """Parked ones that are less urgent."""
        return [one for one in self._roster.parked if one.rank > sequence.rank]

    def _may_fit(self, sequence: Sequence, chances: Chances) -> bool:
        """Whether trying is worth a match; always where nobody runs, for what is known may be out of date."""
        return not self._roster.running or chances.exceed(sequence.refused)

    def _chances(self, room: Room, victims: list[Sequence]) -> Chances:
        return Chances(
            room.host,
            room.device,
            self._roster.hot.unpromised,
            -len(self._roster.running) - len(self._roster.arriving),
            len(victims),
            self._desk.prompts_sealed,
            self._device.laid,
        )
