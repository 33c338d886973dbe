"""Where records of models that choose blocks lie changes nothing: `tiered` is `full`, pauses or not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints
from tests.decoder.block_rig import KINDS, engine_of
from tests.decoder.pauses import (
    check_found_prefix,
    check_loss_is_caught,
    check_parked_anywhere,
    check_replayed,
    check_shared_prefix,
    check_tiered_is_full,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("blocks"), KINDS[request.param])


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(path), torch.float32, torch.device("cpu"))


def check_modes(model: CausalLM, batch: int) -> None:
    # Prompts that are soon done, so that all rows decode together and none has another one's slots.
    make = partial(engine_of, model, max_rows=batch, max_step_tokens=512)
    check_tiered_is_full(make(), make(kv_mode="full"), 24)


@pytest.mark.parametrize("batch", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_tiered_equals_full(model: CausalLM, batch: int) -> None:
    check_modes(model, batch)


@pytest.mark.slow
def test_tiered_equals_full_in_bf16(path: Path) -> None:
    check_modes(CausalLM(ModelSpec.read(path), torch.bfloat16, torch.device("cpu")), 3)


@pytest.mark.parametrize("mode", ["tiered", pytest.param("full", marks=pytest.mark.slow)])
def test_a_found_prefix_gives_the_same_tokens(model: CausalLM, mode: str) -> None:
    check_found_prefix(engine_of(model, kv_mode=mode, tight=False))


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_shared_prefix_has_one_set_of_device_pages(model: CausalLM, mode: str) -> None:
    check_shared_prefix(engine_of(model, kv_mode=mode, tight=False))


@pytest.mark.parametrize("mode", ["tiered", pytest.param("full", marks=pytest.mark.slow)])
def test_parked_anywhere_and_resumed(model: CausalLM, mode: str) -> None:
    """Inside an entry, a block and a page, and at their edges."""
    check_parked_anywhere(partial(engine_of, model, kv_mode=mode, tight=False, max_rows=1), (2, 43))


@pytest.mark.slow
def test_short_of_host_pages_an_answer_is_replayed(model: CausalLM) -> None:
    check_replayed(partial(engine_of, model, tight=False))


def test_an_index_that_is_not_restored_is_caught(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    check_loss_is_caught(partial(engine_of, model, tight=False, max_rows=1), monkeypatch)
