"""What must have reached the arena when a step's tokens are there: its pages may be sealed from then on.

The stream is made to lag behind the host by a kernel that only waits, right before the writes in question.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec

import pytest
import torch

from benchmarks.synthetic import synthetic_model
from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling
from services.decoder.engine.sequence import Sequence as Request
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
LAG_CYCLES = 100_000_000  # about 50 ms
_P = ParamSpec("_P")


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return synthetic_model("qwen3-0.6b", CUDA, torch.bfloat16, 2, dense=dense_ops(CUDA))[1]


def lagging(call: Callable[_P, None]) -> Callable[_P, None]:
    """The same call, reached by the stream only after a while."""

    def late(*args: _P.args, **kwargs: _P.kwargs) -> None:
        torch.cuda._sleep(LAG_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        call(*args, **kwargs)

    return late


def engine_of(model: CausalLM, mode: str) -> OfflineEngine:
    settings = DecoderSettings.model_validate(
        {
            "model": Path("synthetic"),
            "device": "cuda:0",
            "kv_mode": mode,
            "budget_tokens": 64,
            "hot_tokens": 80 if mode == "tiered" else 0,
            "max_rows": 2,
            "max_model_len": 1024,
            "max_step_tokens": 512,
        }
    )
    return OfflineEngine(settings, 2**27, model)


def host_bytes(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """What the processor sees in the arena, without waiting for the device."""
    return [ctypes.string_at(part.data_ptr(), part.numel() * part.element_size()) for part in tensors]


@pytest.mark.parametrize("mode", ["tiered", "full"])
@pytest.mark.parametrize("late", ["records", "bounds", "appended"])
def test_a_step_s_pages_are_complete_when_its_tokens_are_there(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, mode: str, late: str
) -> None:
    engine = engine_of(model, mode)
    runner = engine.runner
    assert runner.index is not None
    engine.scheduler.submit([Request("a", 0, [(7 * i) % 9000 for i in range(640)], Sampling(), 7, 100)])
    engine.step()  # 512 tokens of it; everything is warm now
    torch.cuda.synchronize()
    # Where the late writes belong among the launches: in front of the heart's writes, or of the saved bounds.
    if late == "records":
        monkeypatch.setattr(runner.residence, "write", lagging(runner.residence.write))
    elif late == "bounds":
        monkeypatch.setattr(type(runner.index), "save", lagging(type(runner.index).save))
    else:
        engine.step()
    plan = engine.scheduler.plan()
    assert plan.tokens
    if late == "appended":
        torch.cuda._sleep(LAG_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    pages = {page.page for sequence in engine.scheduler.running for page in sequence.host_pages}
    arena = [engine.arena.index(1)[page] for page in sorted(pages)]
    shape = engine.plan.shape
    per_page = shape.groups * shape.blocks_per_page
    arena += [engine.arena.kv_blocks(1)[page * per_page : (page + 1) * per_page] for page in sorted(pages)]
    runner.launch(plan).collect()
    seen = host_bytes(arena)
    torch.cuda.synchronize()
    assert seen == host_bytes(arena)
