"""An engine that cannot map its store's arena says what one says that can, over every transport."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints
from tests.engine.processes import Engine, Keeper, KvStore, eventually
from tests.engine.remote_rig import ARENA_BYTES, SMALL, Rig, answers, prompt

TOKENS = 60


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    return answers(tiny, [TOKENS] * 4)


def miss_rate(engine: Engine) -> float:
    layers = engine.stats().layers
    return sum(layer.misses for layer in layers) / sum(layer.chosen_blocks for layer in layers)


@pytest.mark.parametrize(
    "transport",
    ["tcp", pytest.param("ucx-shm", marks=pytest.mark.slow), pytest.param("ucx-tcp", marks=pytest.mark.slow)],
)
def test_the_same_answers(
    shm: Path, keep: Keeper, tiny: Path, expected: list[list[int]], transport: str
) -> None:
    rig = Rig(keep, shm, tiny, expected, transport)
    assert rig.says(0) == ""
    together = [rig.ask(number) for number in (1, 2, 3)]
    assert [rig.outcome(name) for name in together] == ["", "", ""]
    assert rig.says(0) == ""  # its pages and their bounds come from the store
    assert rig.engine.events["0-5", 0][0].cached_prompt_tokens == 256
    assert miss_rate(rig.engine) > 0.2
    parked = [rig.begun(number) for number in range(3)]
    for number in range(3):  # four rows, and more urgent ones: some wait, and go on later
        rig.engine.submit(f"urgent-{number}", prompt(number), TOKENS, priority=-1)
    for number in range(3):
        assert rig.engine.answer(f"urgent-{number}") == expected[number]
    assert [rig.outcome(name) for name in parked] == ["", "", ""]
    assert rig.engine.stats().rows_parked > 0
    eventually("everything is back", rig.engine.idle)
    rig.engine.end()
    eventually("the store holds nothing", rig.store_rests())


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("record_dtype", ["auto", "float8"])
def test_a_model_with_an_indexer_of_its_own(
    shm: Path, keep: Keeper, tmp_path: Path, record_dtype: str
) -> None:
    """Its index keys go with the step; layers that follow another one's choice fetch for themselves."""
    wide = {"kv_lora_rank": 128, "max_position_embeddings": 1024}
    model = checkpoints.save(tmp_path, "glm_moe_dsa", index_topk_freq=2, index_skip_topk_offset=1, **wide)
    changes: dict[str, Any] = {"block_tokens": 1, "budget_tokens": 16, "hot_tokens": 17}
    changes["record_dtype"] = record_dtype
    rig = Rig(keep, shm, model, answers(model, [TOKENS] * 2, **changes), "tcp", **changes)
    for number in (0, 1, 0):
        assert rig.says(number) == ""
    assert rig.engine.events["0-3", 0][0].cached_prompt_tokens == 256
    assert miss_rate(rig.engine) > 0.2


def test_what_cannot_work_is_said_at_the_start(shm: Path, keep: Keeper, tiny: Path) -> None:
    store = keep(KvStore(shm / "a", ARENA_BYTES))
    engine = keep(Engine(shm / "a.sock", tiny, store.address, **SMALL, store_access="remote"))
    assert engine.wait() == 2
    assert "start it with --data-transport tcp or ucx" in engine.text


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["nsa", "minimax_m3_vl_text"])
def test_models_that_choose_blocks(shm: Path, keep: Keeper, tmp_path: Path, model_type: str) -> None:
    """Their entries and index keys go with the step, and come back with a prefix that is found."""
    model = checkpoints.save(tmp_path, model_type, max_position_embeddings=1024)
    blocks = ModelSpec.read(model).blocks
    assert blocks is not None
    size, budget = blocks.block_tokens, blocks.read_blocks * blocks.block_tokens
    own: dict[str, Any] = {
        "selector": blocks.selector,
        "block_tokens": size,
        "budget_tokens": budget,
        "hot_tokens": budget + size,
        "dense_layers": blocks.dense_layers,
    }
    rig = Rig(keep, shm, model, answers(model, [TOKENS] * 2, **own), "tcp", **own)
    assert rig.says(0) == ""
    together = [rig.ask(number) for number in (0, 1)]
    assert [rig.outcome(name) for name in together] == ["", ""]
    assert rig.engine.events["0-2", 0][0].cached_prompt_tokens == 256
    eventually("everything is back", rig.engine.idle)
