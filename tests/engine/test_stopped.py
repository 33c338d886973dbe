"""An engine that is stopped past its lease and goes on: nobody's pages were touched, its own included."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.engine.processes import Engine, Keeper, KvStore, eventually

FLAGS: dict[str, object] = {
    "dtype": "float32",
    "budget_tokens": 32,
    "max_step_tokens": 64,
    "max_rows": 4,
    "max_model_len": 448,
    "max_waiting": 64,
    "threads": 1,
}
ARENA_BYTES = 5 * 2**20  # about 29 pages
LEASE_SECONDS = 0.5
TOKENS = 120

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)


def prompt(number: int) -> list[int]:
    return [3 + (7 * i * i + 31 * number * i + number) % 200 for i in range(40 + number)]


@pytest.mark.parametrize(
    "store_dies", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["the store lives", "killed too"]
)
def test_stopped_past_its_lease_in_mid_answer(shm: Path, keep: Keeper, tiny: Path, store_dies: bool) -> None:
    """Meanwhile another engine on the store uses every page that it can get, several times over."""
    store = keep(KvStore(shm / "arena", ARENA_BYTES, lease=LEASE_SECONDS))
    one, other = (
        keep(Engine(shm / f"{number}.sock", tiny, store.address, engine_index=number, **FLAGS))
        for number in range(2)
    )
    one.wait_ready()
    other.wait_ready()
    stopped = range(4)
    for number in stopped:
        one.submit(str(number), prompt(number), TOKENS)
    eventually("it answers", lambda: all(len(one.tokens(str(number))) > 40 for number in stopped))
    one.send(signal.SIGSTOP)
    held = one_holds(store)
    assert held >= 4, "nothing was in the middle of anything"
    if store_dies:
        store.end(signal.SIGKILL)
        store = keep(store.again())
    else:
        eventually("its lease ends", lambda: "event=lease_expired client=engine-0@" in store.text)
    busy = range(10, 19)
    for number in busy:
        other.submit(str(number), prompt(number), TOKENS)
    for number in () if store_dies else list(busy)[:5]:  # a restarted store waits for whoever lives
        other.answer(str(number))
    time.sleep(2 * LEASE_SECONDS)
    one.send(signal.SIGCONT)
    answers = {number: one.answer(str(number)) for number in stopped}
    answers |= {number: other.answer(str(number)) for number in busy}
    settings = DecoderSettings.model_validate({"model": tiny, **FLAGS, "prefix_cache": False})
    alone = OfflineEngine(settings, ARENA_BYTES)
    for number, answer in answers.items():
        right = Sequence("r", 0, prompt(number), Sampling(), seed=1, max_tokens=TOKENS)
        alone.generate([right])
        assert answer == right.generated, number
    eventually("everything has come back", lambda: one.idle() and other.idle())
    assert (store.stats().open_pages, store.stats().sealed_pages) == (0, 0)


def one_holds(store: KvStore) -> int:
    now = store.stats()
    return now.open_pages + now.sealed_pages
