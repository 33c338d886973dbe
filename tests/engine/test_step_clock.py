"""The device's times add up, whatever steps follow one another; CUDA's events are made up here."""

from __future__ import annotations

import pytest

from services.decoder.engine import step_clock
from services.decoder.engine.device_times import DeviceTimes
from services.decoder.engine.running_step import RunningStep
from services.decoder.engine.step_clock import StepClock
from services.decoder.engine.step_plan import StepPlan


class Event:
    """One that happens a microsecond after the one before it."""

    count = 0

    def __init__(self) -> None:
        Event.count += 1
        self.at = Event.count

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) / 1e3


def test_every_step_but_the_last_is_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode, two chunks of a prompt that draw nothing, decode, decode."""
    monkeypatch.setattr(step_clock, "_now", Event)
    clock = StepClock()
    for decodes in (True, False, False, True, True):
        mark = clock.begin(decodes=decodes, only=decodes, moves=False)
        clock.inputs(mark)
        if decodes:
            clock.decoded(mark)
        clock.end(mark)
        RunningStep(StepPlan(), clock=clock, mark=mark).collect()
        assert mark.before is None
    # A step that decodes takes three events, so two microseconds; a chunk's takes one.
    busy = 2000 + 1000 + 1000 + 2000
    assert clock.times == DeviceTimes(steps=2, decode_ns=2000, busy_ns=busy, idle_ns=2000)


def test_bringing_rows_into_place_is_no_decoding_and_no_idling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "_now", Event)
    clock = StepClock()
    for moves in (False, True, False):
        mark = clock.begin(decodes=True, only=True, moves=moves)
        clock.inputs(mark)
        clock.decoded(mark)
        clock.end(mark)
        RunningStep(StepPlan(), [], None, clock=clock, mark=mark).collect()
    # The second begins a microsecond before its inputs.
    assert clock.times == DeviceTimes(steps=2, decode_ns=2000, busy_ns=2000 + 3000, idle_ns=2000)
