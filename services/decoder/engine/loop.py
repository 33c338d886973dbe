"""The engine's loop: plan, run, apply, publish.

Knows the scheduler and the runner by their calls. One thread runs it; requests come in from others, under
a lock that is never held during a forward pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.contract.errors import HotsetError, Unavailable
from services.decoder.engine.capacity_book import Capacities
from services.decoder.engine.host_pages import PagesLost
from services.decoder.engine.runner import Runner
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import Finish, Sequence
from services.decoder.engine.step_plan import Planned, StepPlan
from services.decoder.engine.stepper import News, StepFailed, Stepper

_log = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.2  # between tries while the store is out of reach or has no room
_IDLE_SECONDS = 0.5  # before the books are checked, which no request should have to wait for


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Counters since start and gauges of now."""

    running: int = 0
    waiting: int = 0
    parked: int = 0  # of those that wait
    parkings: int = 0
    releases: int = 0
    rows_used: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    integrity_violations: int = 0
    steps: int = 0
    step_ns: int = 0
    planned: dict[str, int] = field(default_factory=lambda: {each.value: 0 for each in Planned})  # steps
    hot: Capacities = field(default_factory=Capacities)


class Loop:
    """Owns the scheduler; `publish` gets every step's news, on the loop's thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        publish: Callable[[News], None],
        *,
        queue_seconds: float = 0.0,
        store_seconds: float = 0.0,
        seals_first: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """How it deals with its clients.

        Args:
            scheduler: the loop's from now on.
            runner: likewise.
            publish: gets news.
            queue_seconds: how long a choice may wait for its first row; 0 = for ever.
            store_seconds: how long a choice with pages may wait for a store that is away; 0 = for ever.
            seals_first: whoever hears of an end can find its pages in the store.
            clock: monotonic seconds.
        """
        self._scheduler = scheduler
        self._runner = runner
        self._publish = publish
        self._queue_seconds = queue_seconds
        self._store_seconds = store_seconds
        self._away_since: float | None = None
        self._seals_first = seals_first
        self._clock = clock
        self._lock = threading.Condition()
        self._preparing = threading.Lock()  # one request at a time, or the loop would wait for all of them
        self._stepper = Stepper(scheduler, runner, self._lock)
        self._aborts: list[tuple[str, set[int]]] = []
        self._ending = False
        self._stats = LoopStats()

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue a request's choices.

        Raises:
            InvalidRequest, NoRoom: as the scheduler says.
            Unavailable: the engine is going away.
        """
        with self._preparing:
            self._scheduler.prepare(sequences)
        with self._lock:
            if self._ending:
                raise Unavailable("the engine is shutting down")
            for sequence in sequences:
                sequence.submitted = self._clock()
            self._scheduler.submit(sequences)
            self._lock.notify()

    def abort(self, request_id: str, choices: set[int]) -> None:
        """End choices before the next step; empty means all; unknown ones are ignored."""
        with self._lock:
            self._aborts.append((request_id, choices))
            self._lock.notify()

    def stop(self) -> None:
        """Let `run` return after the step in progress."""
        with self._lock:
            self._ending = True
            self._lock.notify()

    def stats(self) -> LoopStats:
        """The latest figures."""
        with self._lock:
            scheduler = self._scheduler
            running = len(scheduler.running)
            return replace(
                self._stats,
                running=running,
                rows_used=running,
                waiting=len(scheduler.waiting),
                parked=sum(sequence.is_parked for sequence in scheduler.waiting),
                parkings=scheduler.parkings,
                releases=scheduler.releases,
                hot=scheduler.hot.capacities(),
            )

    def run(self) -> None:
        """Step until `stop`; check the books when idle, and at the end.

        Raises:
            SetupError: the store came back without this engine's pages.
        """
        while True:
            with self._lock:
                checked = False
                while not (self._ending or self._aborts or self._stepper.has_work):
                    if not self._lock.wait(None if checked else _IDLE_SECONDS):
                        self.check_integrity()
                        checked = True
                if self._ending:
                    return self.check_integrity()
            if not self.step():
                time.sleep(_PAUSE_SECONDS)

    def step(self) -> bool:
        """One step; False if nothing could be computed and a pause is due."""
        with self._lock:
            ended = [s for request, choices in self._aborts for s in self._scheduler.abort(request, choices)]
            self._aborts.clear()
            ended += self._timed_out()
            if ended:
                self._publish([(sequence, []) for sequence in ended])
        begun = time.perf_counter_ns()
        try:
            plan, news = self._stepper.step()
        except Unavailable as error:
            _log.warning("step_delayed error=%s", error)
            self._end_overdue(error)
            return False
        except PagesLost as error:
            self._lose_pages(error)
            return True
        except StepFailed as error:
            self._fail(error.sequences, _reason(error))
            return True
        self._away_since = None
        if self._seals_first and any(sequence.finish for sequence, _ in news):
            self._seal()
        with self._lock:
            self._count(plan, news, time.perf_counter_ns() - begun)
            self._publish(news)
            idle = not (plan.tokens or plan.seats or plan.awaits)
            waits = idle and bool(self._scheduler.waiting or self._scheduler.running)
        return not waits

    def _timed_out(self) -> list[Sequence]:
        """End those who have waited too long for a first row, since one of their request had it last."""
        if not self._queue_seconds:
            return []
        now = self._clock()
        waiting, running = self._scheduler.waiting, self._scheduler.running
        begun = {one.request_id for one in (*running, *waiting) if one.has_run or one.known}
        for sequence in waiting:
            if sequence.request_id in begun:
                sequence.submitted = now
        late = [sequence for sequence in waiting if sequence.submitted < now - self._queue_seconds]
        for sequence in late:
            reason = f"no room came free in {self._queue_seconds:g} s; send the request again later"
            self._scheduler.fail(sequence, reason, Finish.NO_ROOM)
        return late

    def check_integrity(self) -> None:
        """Between steps every page, slot and row is free or owned once. A breach is told, not hidden."""
        try:
            self._scheduler.check_integrity()
            self._runner.residence.check_integrity()
        except AssertionError as error:
            _log.error("integrity_violated what=%r", str(error))
            self._stats = replace(self._stats, integrity_violations=self._stats.integrity_violations + 1)

    def _seal(self) -> None:
        try:
            with self._lock:
                self._scheduler.seal_now()
        except Unavailable as error:
            _log.warning("seals_delayed error=%s", error)
        except PagesLost as error:
            self._stepper.abandon()
            self._lose_pages(error)

    def _lose_pages(self, error: PagesLost) -> None:
        _log.error("pages_lost error=%s", error)
        self._fail([*self._scheduler.running, *self._scheduler.waiting], str(error), holders_only=True)

    def _end_overdue(self, error: Unavailable) -> None:
        """After `store_seconds` without a step, end who holds pages of a store that may never come back."""
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        if self._store_seconds and now - self._away_since >= self._store_seconds:
            reason = (
                f"the store did not answer within {self._store_seconds:g} s ({error}); send the request again"
            )
            self._fail([*self._scheduler.running, *self._scheduler.waiting], reason, holders_only=True)

    def _fail(self, busy: list[Sequence], reason: str, *, holders_only: bool = False) -> None:
        """End every sequence of a step whose result is unknown, or whose host pages are gone."""
        with self._lock:
            hit = [one for one in busy if one.finish is None and (one.host_pages or not holders_only)]
            for sequence in hit:
                self._scheduler.fail(sequence, reason)
            self._publish([(sequence, []) for sequence in hit])

    def _count(self, plan: StepPlan, news: News, nanoseconds: int) -> None:
        if not plan.tokens:
            return
        was = self._stats
        self._stats = replace(
            was,
            prompt_tokens=was.prompt_tokens + sum(end - start for _, start, end in plan.chunks),
            cached_prompt_tokens=was.cached_prompt_tokens + plan.cached_tokens,
            generation_tokens=was.generation_tokens + sum(len(tokens) for _, tokens in news),
            steps=was.steps + 1,
            step_ns=was.step_ns + nanoseconds,
            planned={**was.planned, plan.planned.value: was.planned[plan.planned.value] + 1},
        )


def _reason(error: StepFailed) -> str:
    """What to tell the clients of a step that failed; the log gets the rest."""
    cause = error.__cause__
    if isinstance(cause, HotsetError):  # of a remote store: its text is for people
        _log.error("step_failed tokens=%d error=%s", error.plan.tokens, cause)
        return str(cause)
    _log.error("step_failed tokens=%d", error.plan.tokens, exc_info=error)
    return f"the engine failed in a step: {type(cause).__name__}"
