"""An engine that cannot map its store's arena says what one says that can, over every transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.engine.processes import FLAGS, Engine, Keeper, KvStore, eventually

ARENA_BYTES = 16 * 2**20
TRANSPORTS = {
    "tcp": ("--data-transport=tcp",),
    "ucx-shm": ("--data-transport=ucx", "--ucx-tls=sm,self", "--ucx-lanes=shm"),
    "ucx-tcp": ("--data-transport=ucx", "--ucx-tls=tcp,self", "--ucx-lanes=tcp"),
}
SMALL: dict[str, object] = {**FLAGS, "block_tokens": 4, "budget_tokens": 32, "hot_tokens": 36}
"""Hot slots for one block more than the budget: much is missed."""


def prompt(number: int, length: int = 300) -> list[int]:
    return [3 + (7 * i * i + number * i) % 200 for i in range(length)]


def remote(flags: tuple[str, ...]) -> dict[str, object]:
    """An engine's flags beside a store's."""
    ucx = (flag.removeprefix("--").split("=") for flag in flags if flag.startswith("--ucx"))
    return {"store_access": "remote", "port": 0, **{name.replace("-", "_"): value for name, value in ucx}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)


def answers(model: Path, count: int, tokens: int, **changes: object) -> list[list[int]]:
    """What an engine that maps its arena says to prompts 0, 1, 2 ..., each alone."""
    engine = OfflineEngine(
        DecoderSettings.model_validate({"model": model, **SMALL, "prefix_cache": False, **changes}),
        ARENA_BYTES,
    )
    told = []
    for number in range(count):
        sequence = Sequence("r", 0, prompt(number), Sampling(), seed=1, max_tokens=tokens)
        engine.generate([sequence])
        told.append(sequence.generated)
    return told


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_answers(shm: Path, keep: Keeper, tiny: Path, transport: str) -> None:
    flags = TRANSPORTS[transport]
    store = keep(KvStore(shm / "a", ARENA_BYTES, flags=flags))
    engine = keep(Engine(shm / "a.sock", tiny, store.address, **SMALL, **remote(flags)))
    engine.wait_ready()
    expected = answers(tiny, 4, 60)
    engine.submit("0", prompt(0), 60)
    assert engine.answer("0") == expected[0]
    for number in (1, 2, 3):
        engine.submit(str(number), prompt(number), 60)
    for number in (1, 2, 3):
        assert engine.answer(str(number)) == expected[number]
    engine.submit("again", prompt(0), 60)  # its pages and their bounds come from the store
    assert engine.answer("again") == expected[0]
    assert engine.events["again", 0][0].cached_prompt_tokens == 256
    layers = engine.stats().layers
    chosen, misses = (sum(getattr(layer, name) for layer in layers) for name in ("chosen_blocks", "misses"))
    assert misses > 0.2 * chosen
    eventually("everything is back", engine.idle)
