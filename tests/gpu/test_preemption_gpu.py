"""Parked and resumed on the GPU: the tokens and the bytes of a run that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.synthetic import synthetic_model
from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings
from tests.engine.watch import Watch

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
PROMPT, TOKENS = 700, 100
SAMPLED = Sampling(temperature=0.8, frequency_penalty=0.4, repetition_penalty=1.2)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> CausalLM:
    return synthetic_model("qwen3-0.6b", CUDA, request.param, 3, dense=dense_ops(CUDA))[1]


def engine(model: CausalLM, mode: str) -> OfflineEngine:
    """One row, so that every step is the same size whoever it is of."""
    settings = DecoderSettings.model_validate(
        {
            "model": Path("synthetic"),
            "device": "cuda:0",
            "kv_mode": mode,
            "budget_tokens": 256,
            "hot_tokens": 272 if mode == "tiered" else 0,
            "max_rows": 1,
            "max_model_len": 1024,
            "max_step_tokens": 256,
        }
    )
    return OfflineEngine(settings, 2**28, model)


def ask(name: str, number: int = 0, priority: int = 0) -> Sequence:
    prompt = [(number * 31 + i * i) % 9000 for i in range(PROMPT)]
    return Sequence(name, 0, prompt, SAMPLED, seed=5, max_tokens=TOKENS, priority=priority)


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_parked_anywhere_and_resumed(model: CausalLM, mode: str) -> None:
    """Between a prompt's chunks (negative), inside a block, at a block's and a page's edge, near the end."""
    idle, alone = engine(model, mode), ask("alone")
    watch = Watch(idle, alone)
    idle.generate([alone])
    right = watch.bytes()
    for after in (-1, -2, 1, 6, 21, 69, 70, 98):
        busy = engine(model, mode)
        parked, urgent = ask("parked"), ask("urgent", 7, priority=-1)
        watch = Watch(busy, parked, poison=True)
        busy.scheduler.submit([parked])
        while len(parked.generated) < after or parked.computed < min(PROMPT, -256 * after):
            busy.step()
        busy.scheduler.submit([urgent])
        while busy.scheduler.has_work:
            busy.step()
        assert (busy.scheduler.parkings, busy.scheduler.releases) == (1, 0)
        assert parked.generated == alone.generated, after
        found = watch.bytes()
        assert all(torch.equal(mine, other) for mine, other in zip(found, right, strict=True)), after
        busy.scheduler.check_integrity()
        busy.runner.residence.check_integrity()
