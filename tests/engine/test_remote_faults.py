"""A remote engine whose store stops, dies, or comes back as another: right text or a clear error, in time.

Each time before a request, in the middle of one, and between two; then all goes on without a restart.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.decoder import checkpoints
from tests.engine.processes import Keeper, eventually
from tests.engine.remote_rig import Rig, answers

SECONDS = 2.0
SLOW = pytest.mark.slow
LONG = 2  # the prompt with the longest answer


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
