"""How far ahead of a GPU an end of a prompt is launched, with events of one that is as slow as it is told."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch

from services.decoder.engine import prompt_tails
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.prompt_tails import PromptTails
from services.decoder.engine.running_step import RunningStep
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import StepPlan
from tests.engine.test_prompt_tails import (
    END,
    PROMPT,
    arrive,
    engine,
    expected,
    finish,
    request,
    tails_of,
    talks,
)

__all__ = ["engine", "expected", "talks"]  # fixtures


class Gpu:
    """Says of each event, as an event, whether it is over."""

    def __init__(self) -> None:
        self.is_fast = False
        self.events = 0

    def event(self, _: object) -> Gpu:
        self.events += 1
        return self

    def query(self) -> bool:
        return self.is_fast

    def synchronize(self) -> None:
        self.is_fast = True

    def wait_stream(self, _: object) -> None:
        """Its stream, which does everything at once."""


@pytest.fixture
def slow(engine: OfflineEngine, talks: Sequence, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """One layer may be under way."""
    gpu = Gpu()
    assert engine.plan.shape.layers > 1
    monkeypatch.setattr(prompt_tails, "MOST_LAYERS_AHEAD", 1)
    monkeypatch.setattr(prompt_tails, "_now", gpu.event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(tails_of(engine), "_stream", gpu)
    return gpu


@pytest.fixture
def begun(engine: OfflineEngine, slow: Gpu) -> Sequence:
    """The first layer of its end was launched."""
    one = request("again", [*PROMPT, *END])
    arrive(engine, one)
    assert len(tails_of(engine)._under_way) == 1
    return one


def test_the_next_layer_waits_for_the_one_under_way(
    engine: OfflineEngine, expected: list[int], talks: Sequence, slow: Gpu, begun: Sequence
) -> None:
    tails, said, events = tails_of(engine), len(talks.generated), slow.events
    for _ in range(4):
        engine.step()
        assert tails.advance(), "there is more to launch"
        assert not begun.generated
    assert slow.events == events, "a layer was launched"
    assert len(talks.generated) == said + 4, "a step waited for it"
    slow.is_fast = True
    assert finish(engine, begun) == expected


def test_a_step_goes_on_asking_until_it_is_over(engine: OfflineEngine, slow: Gpu, begun: Sequence) -> None:
    """Or the GPU would have nothing of the end to compute for the rest of a long step."""

    class Step(Gpu):
        def query(self) -> bool:
            slow.is_fast = time.perf_counter() > fast_at
            return time.perf_counter() > over_at

    fast_at, over_at = (time.perf_counter() + seconds for seconds in (0.02, 2.0))
    events, tails = slow.events, tails_of(engine)
    RunningStep(StepPlan(), done=Step(), meanwhile=tails.advance).collect()  # type: ignore[arg-type]  # of a GPU
    assert slow.events > events, "no layer was launched after the first"
    assert tails.told()


def test_a_step_with_chunks_and_one_that_waits_take_no_heed_of_it(
    engine: OfflineEngine, expected: list[int], slow: Gpu, begun: Sequence
) -> None:
    tails = tails_of(engine)
    tails.hold()
    assert tails._begun is None
    assert not tails.advance()
    tails.release()
    assert finish_fast(engine, slow, begun) == expected
    again = request("once more", [*PROMPT, *END])
    slow.is_fast = False
    arrive(engine, again)
    tails.wait_for_one()
    assert finish_fast(engine, slow, again) == expected


def test_what_is_dropped_is_not_under_way(
    engine: OfflineEngine, expected: list[int], slow: Gpu, begun: Sequence
) -> None:
    tails: PromptTails = tails_of(engine)
    engine.runner.wait()
    assert not tails._under_way
    assert [arrival.sequence for arrival in tails.told()] == [begun]


def finish_fast(engine: OfflineEngine, gpu: Gpu, one: Sequence) -> list[int]:
    gpu.is_fast = True
    return finish(engine, one)
