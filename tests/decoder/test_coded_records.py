"""Latent records in eight bits in an engine: coded once, and from then on the same to whoever reads them.

What is promised of a schedule is promised with these: `tiered` is `full`, what is found, parked or replayed
is what was there, bit for bit. Where products have other shapes, their last bits differ, and now and then a
number falls to its other neighbour among the codes. Answers differ from exact records' (docs/quality.md).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.decoder.attention.latent_heart import LatentHeart
from services.decoder.kernels.record_code import code_records, decode_records
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints
from tests.decoder.dsa_rig import CASES, ask, check, engine_of, prompt_of
from tests.decoder.pauses import (
    PROMPT,
    TOKENS,
    check_found_prefix,
    check_parked_anywhere,
    check_tiered_is_full,
)
from tests.engine.watch import Watch

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
CODED: dict[str, object] = {"record_dtype": "float8"}
BY_PAGES: dict[str, object] = {**CODED, "max_step_tokens": 64}
"""Chunks end with pages, so that who goes on behind a page computes what the first one did, in its shapes."""
LATENT, ROPED = 128, 16


def save(path: Path, name: str, **changes: object) -> Path:
    case = CASES[name]
    return checkpoints.save(path, case.model_type, kv_lora_rank=LATENT, **{**case.changes, **changes})


@pytest.fixture(scope="module", params=["glm shared", pytest.param("deepseek", marks=pytest.mark.slow)])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("dsa"), request.param)


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(path), torch.float32, CPU)


def answer(model: CausalLM, **changes: object) -> list[int]:
    engine = engine_of(model, max_rows=1, **changes)
    engine.generate([one := ask("one", PROMPT, TOKENS)])
    check(engine)
    return one.generated


def check_modes(model: CausalLM, batch: int, **common: object) -> None:
    make = partial(engine_of, model, max_rows=batch, **CODED, **common)
    check_tiered_is_full(make(), make(kv_mode="full", hot_tokens=0), 24)


@pytest.mark.parametrize("batch", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_tiered_equals_full(model: CausalLM, batch: int) -> None:
    check_modes(model, batch)


def test_tiered_equals_full_in_bf16(path: Path) -> None:
    check_modes(CausalLM(ModelSpec.read(path), torch.bfloat16, CPU), 3)


@pytest.mark.slow
def test_beside_index_keys_in_eight_bits(model: CausalLM) -> None:
    check_modes(model, 3, index_dtype="float8")


@pytest.mark.parametrize("mode", ["tiered", pytest.param("full", marks=pytest.mark.slow)])
def test_a_found_prefix_gives_the_same_tokens(model: CausalLM, mode: str) -> None:
    check_found_prefix(engine_of(model, kv_mode=mode, hot_tokens=0, **BY_PAGES))


@pytest.mark.parametrize("mode", ["tiered", pytest.param("full", marks=pytest.mark.slow)])
def test_parked_and_resumed(model: CausalLM, mode: str) -> None:
    one_row: dict[str, object] = {"kv_mode": mode, "hot_tokens": 0, "max_rows": 1}
    check_parked_anywhere(partial(engine_of, model, **CODED, **one_row), (7, 43))


@pytest.mark.parametrize("mode", ["tiered", pytest.param("full", marks=pytest.mark.slow)])
def test_whose_pages_were_taken_is_computed_again(model: CausalLM, mode: str) -> None:
    """The only row goes to a more urgent one that needs all pages; then prompt and answer are made anew."""
    shape = engine_of(model, **BY_PAGES).plan.shape
    planes = sum(plane.page_bytes for plane in shape.planes(with_index=True))
    arena_bytes = 2 * 2**20 + 5 * planes + 1024
    found: list[list[Tensor]] = []
    answers: list[list[int]] = []
    for disturbed in (False, True):
        short: dict[str, object] = {"hot_tokens": 0, "max_rows": 1, "max_model_len": 320}
        engine = engine_of(model, arena_bytes, kv_mode=mode, **BY_PAGES, **short)
        assert engine.host.total == 5
        one = ask("one", PROMPT, TOKENS)
        watch = Watch(engine, one)
        engine.scheduler.submit([one])
        while len(one.generated) < 20:
            engine.step()
        engine.generate([ask("urgent", prompt_of(290, 5), 20, priority=-1)] if disturbed else [])
        assert (engine.scheduler.releases > 0) == disturbed
        assert (watch.computed > len(PROMPT) + TOKENS) == disturbed, "nothing was computed twice"
        found.append(watch.bytes())
        answers.append(one.generated)
        check(engine)
    assert answers[0] == answers[1]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_how_a_prompt_is_cut_changes_next_to_nothing(tmp_path: Path) -> None:
    """A chunk attends to its own records as to those before it: as they are kept.

    If it did not, a number in twenty would be another. A model that does not make much of a last bit.
    """
    model = CausalLM(ModelSpec.read(save(tmp_path, "deepseek", initializer_range=0.05)), torch.float32, CPU)
    records: list[list[Tensor]] = []
    for step_tokens, window_tokens in ((48, 64), (17, 64), (200, 64), (48, 512)):
        cut: dict[str, object] = {"max_step_tokens": step_tokens, "window_tokens": window_tokens}
        engine = engine_of(model, max_rows=1, **CODED, **cut)
        watch = Watch(engine, one := ask("one", PROMPT, 1))
        engine.generate([one])
        records.append([layer for layer in watch.bytes() if layer.dtype == torch.uint8])
        assert len(records[-1]) == 4
    for others in records[1:]:
        for layer, (ours, theirs) in enumerate(zip(others, records[0], strict=True)):
            assert float((ours != theirs).float().mean()) < 2e-3, layer


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_they_are_records_of_the_numbers_that_come_back(
    model: CausalLM, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that keeps float32, but of what the code leaves of it, says the same; others do not."""
    hot: dict[str, object] = {"kv_mode": mode, "hot_tokens": 0 if mode == "full" else 17}
    coded, exact = answer(model, **CODED, **hot), answer(model, **hot)
    assert coded != exact, "nothing was coded"

    def rounded(heart: LatentHeart, record: Tensor) -> Tensor:
        return decode_records(code_records(record, LATENT), LATENT, ROPED, record.dtype)

    monkeypatch.setattr(LatentHeart, "_kept", rounded)
    assert answer(model, **hot) == coded


def logits_of(path: Path, dtype: torch.dtype, **changes: object) -> tuple[list[int], Tensor]:
    """An answer, and the logits of every token of it: [TOKENS, vocab]."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    seen: list[Tensor] = []

    def note(module: nn.Module, inputs: object, logits: Tensor) -> None:
        seen.append(logits.reshape(-1, logits.shape[-1])[-1:].float())

    module.lm_head.register_forward_hook(note)
    found = answer(CausalLM(ModelSpec.read(path), dtype, CPU, model=module), **changes)
    return found, torch.cat(seen)[-TOKENS:]


def test_how_far_logits_are_from_transformers(tmp_path: Path) -> None:
    """Along our own answer, with weights small enough and a choice wide enough for errors not to run away."""
    wide: dict[str, object] = {"budget_tokens": 256, "hot_tokens": 0, "kv_mode": "full"}
    path = checkpoints.save(
        tmp_path, "deepseek_v32", kv_lora_rank=LATENT, index_topk=256, initializer_range=0.03
    )
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def off(dtype: torch.dtype, record_dtype: str) -> float:
        """Relative to their logits."""
        tokens, ours = logits_of(path, dtype, record_dtype=record_dtype, **wide)
        with torch.inference_mode():
            theirs = plain(torch.tensor([[*PROMPT, *tokens[:-1]]])).logits[0, -TOKENS:]
        error = float((ours - theirs).norm() / theirs.norm())
        same = float((ours.argmax(1) == theirs.argmax(1)).float().mean())
        print(f"{dtype} record_dtype={record_dtype} logits_off={error:.2e} same_best={same:.2f}")
        return error

    assert off(torch.float32, "auto") < 1e-5
    assert 5e-3 < off(torch.float32, "float8") < 0.08
    assert off(torch.bfloat16, "auto") < 0.03
    assert off(torch.bfloat16, "float8") < 0.09
