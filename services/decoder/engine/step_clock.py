"""How long the device computes a step, and how long it waits for the next one.

Knows CUDA events; not what a step is. A step's times are read when the step after it has been collected, so
that reading them never waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from services.decoder.engine.device_times import DeviceTimes


@dataclass(slots=True)
class Mark:
    """The events of one step."""

    decodes: bool  # continues rows of the step before it
    decodes_only: bool
    moved: torch.cuda.Event | None  # before rows were brought into place, where any were
    began: torch.cuda.Event | None = None
    decoded: torch.cuda.Event | None = None
    ended: torch.cuda.Event | None = None
    before: Mark | None = None

    @property
    def first(self) -> torch.cuda.Event | None:
        """Before its first launch."""
        return self.began if self.moved is None else self.moved


@dataclass(slots=True)
class StepClock:
    """One stream's; the engine's loop alone calls it, but for `times`."""

    times: DeviceTimes = field(default_factory=DeviceTimes)
    _last: Mark | None = None

    def begin(self, *, decodes: bool, only: bool, moves: bool) -> Mark:
        """A step comes next; if it `moves`, then with what brings its rows into place."""
        self._last = Mark(decodes, only, _now() if moves else None, before=self._last)
        return self._last

    def inputs(self, mark: Mark) -> None:
        """Its inputs come next."""
        mark.began = _now()

    def decoded(self, mark: Mark) -> None:
        """Its decode rows are launched."""
        mark.decoded = _now()

    def end(self, mark: Mark) -> None:
        """All of it is launched."""
        mark.ended = _now()

    def collected(self, mark: Mark) -> None:
        """Its tokens have come, so the step before it is over, and the times of that one can be booked."""
        before, mark.before = mark.before, None
        if before is None or before.ended is None:
            return  # the first, or one that failed midway
        times = self.times
        only = before.decodes_only and before.decoded is not None
        self.times = DeviceTimes(
            steps=times.steps + only,
            decode_ns=times.decode_ns + (_ns(before.began, before.decoded) if only else 0),
            busy_ns=times.busy_ns + _ns(before.first, before.ended),
            idle_ns=times.idle_ns + (_ns(before.ended, mark.first) if mark.decodes else 0),
        )


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record()
    return event


def _ns(begin: torch.cuda.Event | None, end: torch.cuda.Event | None) -> int:
    assert begin is not None
    assert end is not None
    return int(begin.elapsed_time(end) * 1e6)
