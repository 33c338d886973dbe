"""Who of those that wait gets a row: the queue's order, who may be passed, and at whose expense.

Knows counts of rows and pages. What is taken from whom, and why: docs/decisions/0013.
"""

from __future__ import annotations

from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import PageDesk
from services.decoder.engine.room import Chances, Pages, Room
from services.decoder.engine.roster import Roster
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import StepPlan

MOST_PASSED = 8
"""Choices that may get a row before one that waited ahead of them, and how far a step looks down it."""


class Admission:
    """Puts those who get a row into the step's plan."""

    def __init__(self, limits: Limits, desk: PageDesk, roster: Roster) -> None:
        self._limits = limits
        self._desk = desk
        self._roster = roster

    def is_worth_trying(self, room: Room) -> bool:
        """Whether somebody may get a row now who did not the last time."""
        for place, sequence in enumerate(self._roster.waiting[: MOST_PASSED + 1]):
            victims = [] if place else self._victims(sequence)
            has_row = self._roster.free_rows > 0 or bool(victims)
            if has_row and self._may_fit(sequence, self._chances(room, victims)):
                return True
            if sequence.passed >= MOST_PASSED:
                break
        return False

    def admit_urgent(self, plan: StepPlan, room: Room) -> None:
        """Let those in who may take a row from running ones, while none of these is in the plan."""
        running = len(self._roster.running)  # each wants a token of the step
        while self._roster.waiting and (victims := self._victims(self._roster.waiting[0])):
            budget = self._limits.max_step_tokens - running - plan.tokens
            if not self._admit(self._roster.waiting[0], plan, room, budget, victims):
                break

    def admit(self, plan: StepPlan, room: Room) -> None:
        """Let those in whom there is room for, as they come; who was passed too often holds the queue up."""
        passed: list[Sequence] = []
        for sequence in list(self._roster.waiting):
            budget = self._limits.max_step_tokens - plan.tokens
            if not self._roster.free_rows or len(passed) == MOST_PASSED:
                break
            if self._admit(sequence, plan, room, budget, []):
                for one in passed:
                    one.passed += 1
            elif sequence.passed >= MOST_PASSED:
                break
            else:
                passed.append(sequence)

    def _victims(self, sequence: Sequence) -> list[Sequence]:
        """Running ones whose row one that waits may take, most urgent first."""
        running = self._roster.running
        return [one for one in running if one.priority > sequence.priority and not one.is_sheltered]

    def _admit(
        self, sequence: Sequence, plan: StepPlan, room: Room, budget: int, victims: list[Sequence]
    ) -> bool:
        """Give one that waits a row, if there is room for it, or can be made at the victims' expense."""
        if budget < self._limits.block_tokens and sequence.is_prefilling:
            return False
        siblings = [one for one in self._roster.running if one.request_id == sequence.request_id]
        if self._desk.shares and any(one.is_prefilling for one in siblings):
            return False  # the choices of a request share its prompt; the first computes it
        chances = self._chances(room, victims)
        if not self._may_fit(sequence, chances):
            return False
        matched = [] if sequence.is_parked else self._match(sequence, room)
        chunk = self._limits.next_chunk(sequence, budget)
        need, spare = self._roster.lacking(sequence, sequence.admission_tokens), len(self._roster.running)
        possible = chunk is not None or not sequence.is_prefilling
        # Each running row may want a page soon.
        fits = possible and self._clear(sequence, need.and_each(spare), room, victims)
        if not fits:
            if possible:
                sequence.refused = chances
            if matched:
                room.host += self._desk.give(matched)
                sequence.host_pages = []
                sequence.rewind()
            return False
        room.spend(need)
        self._roster.seat(sequence)
        if chunk is None:
            plan.seats.append(sequence)
        else:
            plan.chunks.append(chunk)
        return True

    def _match(self, sequence: Sequence, room: Room) -> list[HostPage]:
        """Begin with what is in the store."""
        before = self._desk.free
        matched = self._desk.match(sequence)
        room.host -= before - self._desk.free
        sequence.host_pages, sequence.sealed = matched, len(matched)
        sequence.find(len(matched) * self._limits.page_tokens)
        return matched

    def _clear(self, sequence: Sequence, need: Pages, room: Room, victims: list[Sequence]) -> bool:
        """Make room for one that waits, at the expense of victims and of parked ones behind it, or not."""
        victims = list(victims)
        behind = [one for one in self._roster.parked if one.rank > sequence.rank]
        host = room.host + sum(len(one.host_pages) for one in (*behind, *victims))
        device = room.device + sum(len(one.device_pages) for one in victims)
        if need.host > host or need.device > device:
            return False
        while not (self._roster.free_rows and room.fits(need)):
            if behind and need.host > room.host:
                room.gain(self._roster.release(behind.pop()))
            elif victims:
                behind.append(victims.pop())
                room.gain(self._roster.park(behind[-1]))
            else:
                return False  # pages that were counted twice are shared
        return True

    def _may_fit(self, sequence: Sequence, chances: Chances) -> bool:
        """Whether trying is worth a match; always where nobody runs, for what is known may be out of date."""
        return not self._roster.running or chances.exceed(sequence.refused)

    def _chances(self, room: Room, victims: list[Sequence]) -> Chances:
        return Chances(
            room.host, room.device, -len(self._roster.running), len(victims), self._desk.prompts_sealed
        )
