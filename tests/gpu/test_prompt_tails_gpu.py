"""Ends of prompts beside the steps: behind what steps do with the same memory, and not too far ahead.

Either stream is made to lag by a kernel that only waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from services.decoder.engine import prompt_tails
from services.decoder.engine.loads_beside import LoadsBeside
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.prompt_tails import PromptTails
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.history import KeysValues
from services.decoder.models.causal_lm import CausalLM
from tests.gpu.test_arrivals_gpu import LAG_CYCLES, PROMPT, finish, request
from tests.gpu.test_order_gpu import engine_of, model

__all__ = ["model"]  # a fixture

pytestmark = pytest.mark.gpu

History = Callable[[int, PrefillChunk], Iterator[KeysValues]]

OTHER = [(11 * i + 5) % 9000 for i in range(1000)]  # two steps compute it


def tails_of(engine: OfflineEngine) -> PromptTails:
    assert engine.runner.tails is not None
    return engine.runner.tails


def test_it_is_launched_as_fast_as_it_is_computed(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream takes so many launches; the next one would wait, and with it whoever launches steps."""
    monkeypatch.setattr(prompt_tails, "MOST_LAYERS_AHEAD", 1)
    answers = []
    for late in (False, True):
        engine = engine_of(model, "full")
        finish(engine, request("first", PROMPT, 2))
        talks = request("talks", [5, 6, 7], 900)
        engine.scheduler.submit([talks])
        for _ in range(3):
            engine.step()
        newcomer, tails = request("newcomer", [*PROMPT, 1, 2, 3], 20), tails_of(engine)
        engine.scheduler.submit([newcomer])
        if late:
            with torch.cuda.stream(tails._stream):
                torch.cuda._sleep(LAG_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            while tails._begun is None:
                engine.step()
            said = len(talks.generated)
            for _ in range(10):
                engine.step()
                assert len(tails._under_way) == 1, "more than one layer was launched"
            assert len(talks.generated) == said + 10
        while not newcomer.finish:
            engine.step()
        answers.append(newcomer.generated)
    assert answers[0] == answers[1]


def slowly(history: History) -> History:
    """Earlier keys lie in a window for a while before a step gets to read them."""

    def slow(layer: int, chunk: PrefillChunk) -> Iterator[KeysValues]:
        for window in history(layer, chunk):
            if torch.cuda.current_stream() == torch.cuda.default_stream():
                torch.cuda._sleep(LAG_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            yield window

    return slow


def at_once(beside: LoadsBeside, begun: list[bool]) -> Callable[[], bool]:
    """Whatever is loaded has come when it is looked for; notes whether steps computed at every launch."""
    work = beside.work

    def launched() -> bool:
        if beside._coming and (there := beside._coming[0][1]) is not None:
            there.synchronize()
        did = work()
        begun.append(did and not torch.cuda.default_stream().query())
        return did

    return launched


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_it_begins_behind_what_a_step_computes(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A step's chunk has earlier keys in a window, where those of an end would come."""
    answers, begun = [], list[bool]()
    for late in (False, True):
        engine = engine_of(model, mode)
        finish(engine, request("first", PROMPT, 2))
        beside, residence = engine.runner.beside, engine.runner.residence
        assert beside is not None
        if late:
            monkeypatch.setattr(residence, "history", slowly(residence.history))
            monkeypatch.setattr(beside, "work", at_once(beside, begun))
        other, newcomer = request("other", OTHER, 12), request("newcomer", [*PROMPT, 1, 2, 3], 12)
        engine.scheduler.submit([other])
        engine.scheduler.submit([newcomer])
        while not (other.finish and newcomer.finish):
            engine.step()
        assert newcomer.cached == len(PROMPT)
        answers.append((other.generated, newcomer.generated))
    assert any(begun), "no end was launched while a step computed"
    assert answers[0] == answers[1]
