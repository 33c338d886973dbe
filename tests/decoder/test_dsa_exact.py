"""Where latent records lie changes nothing: `tiered` is `full`, after a prefix hit and after a pause too."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints
from tests.decoder.dsa_rig import CASES, ask, check, engine_of
from tests.decoder.pauses import (
    PROMPT,
    TOKENS,
    check_found_prefix,
    check_loss_is_caught,
    check_parked_anywhere,
    check_replayed,
    check_shared_prefix,
    check_tiered_is_full,
)
from tests.engine.watch import Watch

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = pytest.mark.parametrize("mode", ["tiered", "full"])


@pytest.fixture(scope="module", params=["deepseek", "glm shared"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES[request.param]
    return checkpoints.save(tmp_path_factory.mktemp("dsa"), case.model_type, **case.changes)


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(path), torch.float32, torch.device("cpu"))


def check_modes(model: CausalLM, batch: int) -> None:
    make = partial(engine_of, model, max_rows=batch)
    check_tiered_is_full(make(), make(kv_mode="full", hot_tokens=0), 24)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_tiered_equals_full(model: CausalLM, batch: int) -> None:
    check_modes(model, batch)


def test_tiered_equals_full_in_bf16(path: Path) -> None:
    check_modes(CausalLM(ModelSpec.read(path), torch.bfloat16, torch.device("cpu")), 3)


def test_index_keys_in_eight_bits_come_back_too(model: CausalLM) -> None:
    """`tiered` is `full`, and what is loaded with a found prefix is what was there."""
    coded: dict[str, object] = {"index_dtype": "float8", "hot_tokens": 0, "max_rows": 1}
    answers: dict[str, list[list[int]]] = {}
    for mode in ("full", "tiered"):
        engine = engine_of(model, kv_mode=mode, **coded)
        answers[mode] = []
        for name in ("first", "again"):
            one = ask(name, PROMPT, TOKENS)
            watch = Watch(engine, one, poison=True)
            engine.generate([one])
            assert watch.loads == (name == "again")
            answers[mode].append(one.generated)
        keys = len(engine.plan.index_layers) * engine.plan.device_pages * 64
        assert engine.plan.index_bytes == keys * (32 + 16)
        check(engine)
    assert answers["full"] == answers["tiered"]
    assert answers["full"][0] == answers["full"][1]


@MODES
def test_a_found_prefix_gives_the_same_tokens(model: CausalLM, mode: str) -> None:
    check_found_prefix(engine_of(model, kv_mode=mode, hot_tokens=0))


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_shared_prefix_has_one_set_of_device_pages(model: CausalLM, mode: str) -> None:
    check_shared_prefix(engine_of(model, kv_mode=mode, hot_tokens=0))


@MODES
def test_parked_anywhere_and_resumed(model: CausalLM, mode: str) -> None:
    """Inside a page and at its edge."""
    check_parked_anywhere(partial(engine_of, model, kv_mode=mode, hot_tokens=0, max_rows=1), (1, 7, 43, 44))


@MODES
def test_short_of_host_pages_an_answer_is_replayed(model: CausalLM, mode: str) -> None:
    check_replayed(partial(engine_of, model, kv_mode=mode, hot_tokens=0))


def test_index_keys_that_are_not_restored_are_caught(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_loss_is_caught(partial(engine_of, model, hot_tokens=0, max_rows=1), monkeypatch)
