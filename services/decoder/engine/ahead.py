"""The step after one that is still under way: what of it is sure before that one's tokens are known.

Knows counts and pages, as the scheduler does. The books lag a step behind here, so:

    rows      those that the running step draws for go on, but for those whose last token that is
    chunks    of a prompt follow those that run; a prompt that ends in the running step decodes
    pages     whatever is free was named by no step under way, so it may be taken
    nobody    gives way, is parked, or is seated in mid-answer: that is left to `Scheduler.plan`

A row whose token turns out to be its last computes once in vain. Why: docs/decisions/0027.
"""

from __future__ import annotations

from services.decoder.engine.admission import MANY_PAGES, Admission
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import FEW_GIVEN, MOST_GIVEN, PageDesk
from services.decoder.engine.resident_pages import ResidentPages
from services.decoder.engine.room import Pages, Room
from services.decoder.engine.roster import Roster
from services.decoder.engine.step_plan import Planned, StepPlan


class Ahead:
    """Decides steps that need not wait; the scheduler's own."""

    def __init__(
        self, limits: Limits, desk: PageDesk, device: ResidentPages, roster: Roster, admission: Admission
    ) -> None:
        self._limits = limits
        self._desk = desk
        self._device = device
        self._roster = roster
        self._admission = admission
        self._is_busy = False  # whether the last plan had many pages to deal with already

    def plan(self, running: StepPlan) -> StepPlan | Planned:
        """The step after `running`, with its pages, or why it cannot be decided yet.

        Raises:
            Unavailable: the store is out of reach; `Scheduler.plan` may be called, after `apply`.
        """
        plan = self._continue(running)
        if isinstance(plan, Planned):
            return plan
        if not plan.decodes:
            return Planned.PROMPTS if running.tokens else Planned.IDLE
        if any(sequence.sampling.wants_logprobs for sequence in plan.sequences):
            return Planned.LOGPROBS
        need, room = self._need(plan), self._room()
        if not room.fits(need):
            return Planned.PAGES
        # Of a long sequence, that its row is left, that it is found and that it gets its pages cost the host
        # 2 to 5 ms each: a step each, and no device waits. Where such steps follow each other, rows would
        # stay empty for it, which is worse.
        bare = sum(len(one.host_pages) for one in plan.sequences if not one.device_pages)
        was_busy, self._is_busy = self._is_busy, bare + self._roster.left_pages > MANY_PAGES
        most = FEW_GIVEN if self._is_busy else MOST_GIVEN
        if self._admission.is_worth_trying(room):
            hindrance = self._hindrance(plan, running)
            if hindrance is not None:
                return hindrance
            chunks, newcomers = len(plan.chunks), len(plan.newcomers)
            asked = self._admit(plan, need, only_short=self._is_busy and not was_busy)
            if len(plan.chunks) > chunks or len(plan.newcomers) > newcomers:
                most = FEW_GIVEN
            if asked > MANY_PAGES:
                most = 0
                del plan.chunks[chunks:], plan.newcomers[newcomers:]  # they get their pages in the next step
        needs = self._roster.needs(plan)
        want = sum(count for _, count in needs)
        pages = self._desk.exchange(want, most) if want or most else []
        if pages is None:
            return Planned.PAGES
        self._roster.equip(plan, needs, pages)
        plan.resizes = self._roster.hot.rebalance(plan.seated_rows)
        return plan

    def _continue(self, running: StepPlan) -> StepPlan | Planned:
        """Those that have rows, in the order of `Scheduler.plan`."""
        plan = StepPlan(planned=Planned.AHEAD)
        place = {sequence: at for at, sequence in enumerate(running.drawing)}
        reached = {sequence: end for sequence, _, end in running.chunks}
        for sequence in self._roster.running:
            if sequence in place:
                if len(sequence.generated) + 1 < sequence.max_tokens:
                    plan.decodes.append(sequence)
                    plan.from_draw.append(place[sequence])
            elif not sequence.is_prefilling:
                return Planned.RESUME
        plan.newcomers += self._roster.unequipped
        for sequence in self._roster.running:
            if sequence.is_prefilling and sequence not in place:
                start = reached.get(sequence, sequence.computed)
                chunk = self._limits.next_chunk(sequence, plan, start)
                if chunk is not None:
                    plan.chunks.append(chunk)
        return plan

    def _hindrance(self, plan: StepPlan, running: StepPlan) -> Planned | None:
        """Why nobody who waits can be let in beside what runs; None if whoever fits can be."""
        waiting = self._roster.waiting
        if self._admission.victims(waiting[0]):
            return Planned.PRIORITY
        takers = self._admission.takers(plan)
        if takers and any(one.has_run or one.known for one in waiting):
            return Planned.RESUME
        if any(one.sampling.wants_logprobs for one in takers):
            return Planned.LOGPROBS
        if any(self._desk.will_find(one, chunk) for one in takers for chunk in running.chunks):
            return Planned.PREFIX
        return None

    def _admit(self, plan: StepPlan, need: Pages, *, only_short: bool) -> int:
        """Let newcomers in, in what pages the others leave them; the pages that the store was asked for."""
        if not self._admission.takers(plan):
            return 0
        if self._desk.has_seals:
            self._desk.exchange(0, FEW_GIVEN)  # they find what was just computed
        room = self._room()
        room.spend(need)
        return self._admission.admit(plan, room, only_short=only_short)

    def _need(self, plan: StepPlan) -> Pages:
        lacking = [self._roster.lacking(sequence, end) for sequence, end in plan.ends]
        return Pages(sum(each.host for each in lacking), sum(each.device for each in lacking))

    def _room(self) -> Room:
        return Room(self._desk.free, self._device.free)
