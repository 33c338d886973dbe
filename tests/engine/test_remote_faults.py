"""A remote engine whose store stops, dies, is full, or comes back as another: right text or a clear error.

Each time before a request, in the middle of one, and between two; then all goes on without a restart.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.contract.errors import HotsetError, Unavailable
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.stepper import StepFailed
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.engine.processes import Keeper, eventually
from tests.engine.remote_rig import ARENA_BYTES, SMALL, Crowd, Rig, answers, prompt

SECONDS = 2.0
SLOW = pytest.mark.slow
LONG = 2  # the prompt with the longest answer
LONG_PAGES = 8  # what 300 tokens need, and a third of their answer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    return answers(tiny, [30, 30, 600])


@pytest.fixture
def rig(
    shm: Path, keep: Keeper, tiny: Path, expected: list[list[int]], transport: str, seconds: float
) -> Iterator[Rig]:
    made = Rig(keep, shm, tiny, expected, transport, store_seconds=seconds)
    yield made
    assert made.engine.popen.poll() is None, "the engine lives"
    made.until_right(1)
    made.engine.end()
    eventually("the store holds nothing", made.store_rests())


@pytest.fixture
def seconds() -> float:
    return SECONDS


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), Unavailable("the store is away")])
def test_a_step_that_fails_abandons_what_it_staged(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError | HotsetError
) -> None:
    """Its pages are given back: who gets them must not find them written by the next step."""
    engine = OfflineEngine(DecoderSettings.model_validate({"model": tiny, **SMALL}), ARENA_BYTES)
    abandoned = []

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(engine.model, "hidden", fails)
    monkeypatch.setattr(engine.runner.residence, "abandon", lambda: abandoned.append(1))
    with pytest.raises(StepFailed):
        engine.generate([Sequence("r", 0, prompt(0), Sampling(), seed=1, max_tokens=1)])
    assert abandoned == [1]


@pytest.mark.parametrize(
    "transport", ["tcp", pytest.param("ucx-shm", marks=SLOW), pytest.param("ucx-tcp", marks=SLOW)]
)
def test_a_store_that_stops_and_goes_on(rig: Rig) -> None:
    rig.struck(LONG, lambda: rig.store.send(signal.SIGSTOP))
    name = rig.ask(0)  # before: it waits for the store, as beside one that is mapped
    time.sleep(0.5)  # so that it finds nobody
    rig.store.send(signal.SIGCONT)
    rig.outcome(name)
    rig.until_right(0)
    rig.store.send(signal.SIGSTOP)  # between: nobody asks for anything meanwhile
    time.sleep(0.5)
    rig.store.send(signal.SIGCONT)
    rig.until_right(0)


@SLOW
@pytest.mark.parametrize("transport", ["tcp", "ucx-shm", "ucx-tcp"])
def test_a_store_that_is_killed_and_started_again(rig: Rig) -> None:
    rig.struck(LONG, lambda: rig.store.end(signal.SIGKILL))
    rig.start_again()
    rig.until_right(0)
    rig.start_again()  # between
    rig.until_right(1)
    rig.store.end(signal.SIGKILL)  # before
    name = rig.ask(0)
    rig.start_again()
    rig.outcome(name)
    rig.until_right(0)


@SLOW
@pytest.mark.parametrize("transport", ["tcp", "ucx-shm"])
def test_a_store_that_comes_back_with_an_empty_arena(rig: Rig) -> None:
    """Its pages have other lives; what was computed is gone, and said to be."""
    rig.struck(LONG, lambda: rig.start_again(anew=True))
    rig.until_right(0)
    rig.start_again(anew=True)  # between
    rig.until_right(1)
    rig.store.end(signal.SIGKILL)  # before
    name = rig.ask(0)
    rig.start_again(anew=True)
    rig.outcome(name)


@SLOW
@pytest.mark.parametrize("seconds", [60.0])
@pytest.mark.parametrize("transport", ["tcp", "ucx-shm"])
def test_with_time_enough_an_interruption_is_a_delay(rig: Rig) -> None:
    name = rig.begun(LONG)
    rig.store.send(signal.SIGSTOP)
    time.sleep(0.5)  # less than the lease
    rig.store.send(signal.SIGCONT)
    assert rig.outcome(name) == ""
    name = rig.begun(LONG)
    rig.start_again()  # another epoch, the same pages
    assert rig.outcome(name) == ""
    assert "session_taken_up" in rig.engine.text


@SLOW
@pytest.mark.parametrize("transport", ["tcp", "ucx-shm", "ucx-tcp"])
def test_an_arena_that_is_taken_away(rig: Rig) -> None:
    """Its store ends; one with another arena takes its place."""
    rig.struck(LONG, rig.unlink)
    rig.start_again(anew=True)
    rig.until_right(0)
    rig.unlink()  # between
    rig.start_again(anew=True)
    rig.until_right(1)
    rig.store.arena.unlink()  # before: for a moment the store does not know
    name = rig.ask(0)
    rig.store_gives_up()
    rig.start_again(anew=True)
    rig.outcome(name)
    rig.until_right(0)


@pytest.mark.parametrize(
    "transport", ["tcp", *(pytest.param(name, marks=SLOW) for name in ("mapped", "ucx-shm", "ucx-tcp"))]
)
def test_a_store_that_is_full(rig: Rig) -> None:
    """Who finds no page waits, as beside a mapped arena, and goes on with the right tokens."""
    with closing(Crowd(rig.store)) as crowd:
        crowd.take(leave=LONG_PAGES)
        name = rig.ask(LONG)  # its prompt finds room, its answer does not
        eventually("it runs out of pages", lambda: rig.engine.stats().pages_given_up > 0)
        rig.waits()
        assert 0 < len(rig.engine.tokens(name)) < len(rig.expected[LONG])
        crowd.give_back()
        assert rig.outcome(name) == ""
        crowd.take()  # before
        name = rig.ask(0)
        rig.waits()
        assert not rig.engine.tokens(name)
        crowd.give_back()
        assert rig.outcome(name) == ""
        crowd.take()  # between
        crowd.give_back()
        assert rig.says(1) == ""
