"""Many on one engine, two engines on one store: all are served, prefixes are shared, deaths are not."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.engine.processes import FLAGS, PATIENCE_SECONDS, Engine, Keeper, KvStore, eventually

ARENA_BYTES = 16 * 2**20
pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [3 + 7 * i * i % 200 for i in range(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Callable[[list[int], int], list[int]]:
    engine = OfflineEngine(
        DecoderSettings.model_validate({"model": tiny, **FLAGS, "prefix_cache": False}), ARENA_BYTES
    )

    def answer(prompt: list[int], tokens: int) -> list[int]:
        sequence = Sequence("r", 0, prompt, Sampling(), seed=1, max_tokens=tokens)
        engine.generate([sequence])
        return sequence.generated

    return answer


def prompt_of(number: int) -> list[int]:
    return PROMPT[number : number + 30 + number % 50]


def cached(engine: Engine, request_id: str) -> int:
    return engine.events[request_id, 0][0].cached_prompt_tokens


def test_two_engines_share_a_prefix_and_not_a_death(
    shm: Path, keep: Keeper, tiny: Path, alone: Callable[[list[int], int], list[int]]
) -> None:
    store = keep(KvStore(shm / "arena", ARENA_BYTES))
    one, other = (
        keep(Engine(shm / f"{number}.sock", tiny, store.address, engine_index=number, **FLAGS))
        for number in range(2)
    )
    one.wait_ready()
    other.wait_ready()

    one.submit("first", PROMPT, 10)
    assert one.answer("first") == alone(PROMPT, 10)
    eventually("the first engine has given its pages back", one.idle)
    other.submit("again", PROMPT, 10)
    assert other.answer("again") == alone(PROMPT, 10)
    assert (cached(one, "first"), cached(other, "again")) == (0, 256)
    assert other.stats().prompt_tokens == 300 - 256
    assert other.stats().cached_prompt_tokens == 256

    one.submit("dies", PROMPT, 500)
    other.submit("lives", PROMPT, 300)
    eventually("both stream", lambda: one.tokens("dies") and other.tokens("lives"))
    one.end(signal.SIGKILL)
    assert other.answer("lives") == alone(PROMPT, 300)
    eventually("everything has come back", other.idle)

    heir = keep(Engine(shm / "heir.sock", tiny, store.address, engine_index=0, **FLAGS))
    heir.wait_ready()
    heir.submit("heir", PROMPT, 10)
    assert heir.answer("heir") == alone(PROMPT, 10)
    assert cached(heir, "heir") == 256, "what the dead engine had sealed is still there"
    eventually("nothing is held", lambda: heir.idle() and other.idle())
    assert (store.stats().open_pages, store.stats().sealed_pages) == (0, 0)


def test_a_crowd_is_served_whole(
    shm: Path, keep: Keeper, tiny: Path, alone: Callable[[list[int], int], list[int]]
) -> None:
    """Two hundred short requests at once where four can run."""
    store = keep(KvStore(shm / "arena", ARENA_BYTES))
    engine = keep(Engine(shm / "e.sock", tiny, store.address, max_waiting=256, **FLAGS))
    engine.wait_ready()
    submitted: dict[str, float] = {}
    first: dict[str, float] = {}
    for number in range(200):
        name = str(number)
        submitted[name] = time.monotonic()
        engine.submit(name, prompt_of(number), 8)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(first) < 200 and time.monotonic() < deadline:
        now = time.monotonic()
        first |= {name: now for name in submitted if name not in first and engine.tokens(name)}
        time.sleep(0.002)
    answers = {name: engine.answer(name) for name in submitted}
    for number in range(0, 200, 5):
        assert answers[str(number)] == alone(prompt_of(number), 8), number
    waits = sorted(first[name] - submitted[name] for name in submitted)
    order = [int(name) for name in sorted(first, key=lambda name: first[name])]
    assert max(abs(place - number) for place, number in enumerate(order)) < 16, (
        "somebody was overtaken by many"
    )
    print(f"queue_p50_s={waits[100]:.2f} queue_p99_s={waits[198]:.2f}")
    eventually("everything has come back", engine.idle)
