"""A device that takes time and computes nothing, for the real stepper; and the time, made up or real.

Knows plans and what they are said to cost; not what a model is, nor whose the pages are. All times are in
microseconds.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from services.decoder.engine.sequence import SampledToken
from services.decoder.engine.step_plan import Arrival, StepPlan


class Clock(Protocol):
    """The host's."""

    @property
    def now(self) -> float:
        """Since some moment."""

    def take(self, cost: float) -> None:
        """The host works for so long, where time is made up; where it is real the work has taken its own."""

    def until(self, moment: float) -> None:
        """Let time go by."""


@dataclass
class MadeUpClock:
    """Goes on by what it is told."""

    now: float = 0.0

    def take(self, cost: float) -> None:
        """At once."""
        self.now += cost

    def until(self, moment: float) -> None:
        """At once."""
        self.now = max(self.now, moment)


class WallClock:
    """Real time."""

    @property
    def now(self) -> float:
        """Of the performance counter."""
        return 1e6 * time.perf_counter()

    def take(self, cost: float) -> None:
        """Nothing to do."""

    def until(self, moment: float) -> None:
        """As the host waits for a device: the sleep stands for its work."""
        while (left := moment - self.now) > 0:
            time.sleep(1e-6 * left)


class Costs(NamedTuple):
    """Of a plan: the device's work, then what the host's takes where time is made up."""

    decode: float
    token: float  # of a prompt
    load: float = 0.0  # of a page, in a step or beside the steps
    plan: float = 0.0
    launch: float = 0.0
    chunk_launch: float = 0.0


@dataclass
class Step:
    """One under way: its decode rows, then its chunks."""

    plan: StepPlan
    device: Device
    done: float = 0.0
    is_complete: bool = False

    def complete(self) -> None:
        """Launch what is left of it."""
        if self.is_complete:
            return
        self.is_complete = True
        device, tokens = self.device, sum(end - start for _, start, end in self.plan.chunks)
        device.run(device.costs.token * tokens, device.costs.chunk_launch if tokens else 0.0)
        self.done = device.free_at

    def collect(self) -> dict[int, SampledToken]:
        """When it is done, the same token for everybody."""
        clock = self.device.clock
        if self.plan.awaits and self.device.coming:
            clock.until(self.device.coming[0][1])
        if self.plan.decodes:
            self.device.late += max(0.0, clock.now - self.done)
        clock.until(self.done)
        return {one.row: SampledToken(5) for one in self.plan.drawing if one.row is not None}


@dataclass
class Device:
    """Takes its time for what it is given, in order; waits where it has nothing."""

    clock: Clock
    costs: Costs
    runs_ahead: bool = True
    free_at: float = 0.0
    waits: list[float] = field(default_factory=list)  # before each step that continues rows
    late: float = 0.0  # time that tokens of such steps lay there unread
    planned: Counter[str] = field(default_factory=Counter)
    coming: deque[tuple[Arrival, float]] = field(default_factory=deque)  # and when each is there

    def launch(self, plan: StepPlan) -> Step:
        """Its loads and decode rows; what arrives comes one after the other, beside them."""
        self.clock.take(self.costs.plan)
        for arrival in plan.arrivals:
            begins = max(self.clock.now, self.coming[-1][1] if self.coming else 0.0)
            self.coming.append((arrival, begins + self.costs.load * len(arrival.loads)))
        self.planned[plan.planned.value] += bool(plan.tokens)
        decodes = bool(plan.decodes)
        if decodes:
            self.waits.append(max(0.0, self.clock.now - self.free_at))
        work = self.costs.load * len(plan.loads) + self.costs.decode * decodes
        self.run(work, self.costs.launch * decodes)
        return Step(plan, self)

    def run(self, work: float, launching: float) -> None:
        """Begins with the first launch of it, and ends no sooner than the last is made.

        Where there is nothing to do time stands still: else a step without chunks would hide a wait.
        """
        if work or launching:
            begins = max(self.free_at, self.clock.now)
            self.clock.take(launching)
            self.free_at = max(begins + work, self.clock.now)

    def arrived(self) -> list[Arrival]:
        """What has come by now."""
        told = []
        while self.coming and self.coming[0][1] <= self.clock.now:
            told.append(self.coming.popleft()[0])
        return told

    def wait(self) -> None:
        """Nothing goes wrong here."""
