"""One step after the other: plan, launch, collect, apply - and on a GPU the next one is under way meanwhile.

Knows the scheduler and the runner by their calls. What a step running ahead may not do is the scheduler's to
say: while one runs, no page and no row that it names changes hands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from services.contract.errors import HotsetError, Unavailable
from services.decoder.engine.host_pages import PagesLost
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import SampledToken, Sequence
from services.decoder.engine.step_plan import Arrival, StepPlan

News = list[tuple[Sequence, list[SampledToken]]]


class Launched(Protocol):
    """A step whose tokens are still to come."""

    @property
    def plan(self) -> StepPlan:
        """What is being computed."""

    def complete(self) -> None:
        """Launch what is left of it; before any other step."""

    def collect(self) -> dict[int, SampledToken]:
        """Wait for the next token by row; a row whose logits are no numbers is left out."""


class Launcher(Protocol):
    """What the stepper asks of a runner."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched while the one before it runs."""

    def launch(self, plan: StepPlan) -> Launched:
        """Begin to compute; a plan that is `ahead` continues the step launched last, with its tokens."""

    def arrived(self) -> list[Arrival]:
        """What was loaded beside the steps and is there, each told once; a step that awaits it has waited."""

    def wait(self) -> None:
        """Until nothing that was launched is under way."""


class StepFailed(Exception):
    """A step whose result is unknown, and so is that of the one beside it; their sequences cannot go on."""

    def __init__(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        super().__init__("a step failed")
        self.plan = plan
        self.sequences = sequences


class Stepper:
    """`lock` guards the scheduler, and is never held during a forward pass."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Launcher,
        lock: AbstractContextManager[object],
        on_plan: Callable[[StepPlan], None] = lambda plan: None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._lock = lock
        self._on_plan = on_plan
        self._ahead: Launched | None = None
        self._broken: StepFailed | None = None  # the step ahead could not be launched

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._ahead is not None or self._broken is not None or self._scheduler.has_work

    def step(self) -> tuple[StepPlan, News]:
        """One step's plan, and what the clients have not seen yet.

        Raises:
            Unavailable: nothing was computed; try again later.
            PagesLost: nothing was computed, and no host page is there any more.
            StepFailed: out of memory, or whatever else torch raises and survives; or a remote store.
        """
        if (broken := self._broken) is not None:
            self.abandon()
            raise broken
        running, self._ahead = self._ahead, None
        if running is None:
            running = self._launch(self._plan())
        ahead = self._plan_ahead(running.plan) if self._runner.runs_ahead else None
        self._complete(running, ahead)
        if ahead is not None:
            self._ahead = self._launch_ahead(ahead)
        try:
            sampled = running.collect()
        except RuntimeError as error:
            others = [one.plan for one in (self._ahead, self._broken) if one is not None]
            raise self._failed(error, running.plan, *others) from error
        with self._lock:
            news = self._scheduler.apply(running.plan, sampled)
            self._scheduler.arrived(self._runner.arrived())
            return running.plan, news

    def _plan(self) -> StepPlan:
        try:
            with self._lock:
                return self._scheduler.plan()
        except PagesLost:
            self.abandon()  # newcomers' pages are written beside the steps
            raise

    def _launch(self, plan: StepPlan) -> Launched:
        self._on_plan(plan)
        try:
            return self._runner.launch(plan)
        except (RuntimeError, HotsetError) as error:
            raise self._failed(error, plan) from error

    def _plan_ahead(self, running: StepPlan) -> StepPlan | None:
        """Before the rest of the running step is launched: its decode rows keep the device busy meanwhile,
        and where launches take longer than what they launch, nothing would later.
        """
        try:
            with self._lock:
                return self._scheduler.plan_ahead(running)
        except Unavailable:
            return None  # the step after this one will say so
        except PagesLost:
            self.abandon()
            raise

    def _complete(self, step: Launched, ahead: StepPlan | None) -> None:
        """Of a step ahead, only now: whoever waited for the tokens of the one before has them."""
        try:
            step.complete()
        except (RuntimeError, HotsetError) as error:
            raise self._failed(error, *(plan for plan in (step.plan, ahead) if plan is not None)) from error

    def _launch_ahead(self, ahead: StepPlan) -> Launched | None:
        self._on_plan(ahead)
        try:
            return self._runner.launch(ahead)
        except torch.AcceleratorError:
            raise
        except (RuntimeError, HotsetError) as error:
            # The next step says so: what the running one computed is sound, and may be the end of some.
            self._broken = StepFailed(ahead, ahead.sequences)
            self._broken.__cause__ = error
            return None

    def _failed(self, error: Exception, *plans: StepPlan) -> Exception:
        """What to raise: an error of the device itself is every later step's too, and ends the engine."""
        if isinstance(error, torch.AcceleratorError):
            return error
        self.abandon()
        return StepFailed(plans[0], list(dict.fromkeys(one for plan in plans for one in plan.sequences)))

    def abandon(self) -> None:
        """Nothing under way will be applied, beside the steps or in one; what it names is let go of when it
        is over.
        """
        self._ahead = self._broken = None
        self._runner.wait()
        with self._lock:
            self._scheduler.abandon()
            self._scheduler.arrived(self._runner.arrived())  # what was being loaded is there by now
