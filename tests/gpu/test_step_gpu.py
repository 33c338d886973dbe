"""What a decode step on the GPU must not do: allocate, or wait for the device; and how it is padded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.synthetic import synthetic_model
from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.decode_graphs import batch_sizes
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Finish, Sampling, Sequence
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
ROWS = 5


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return synthetic_model("qwen3-0.6b", CUDA, torch.bfloat16, 3, dense=dense_ops(CUDA))[1]


def running(model: CausalLM, mode: str, sampling: Sampling) -> OfflineEngine:
    """An engine whose rows all decode."""
    settings = DecoderSettings.model_validate(
        {
            "model": Path("synthetic"),
            "device": "cuda:0",
            "kv_mode": mode,
            "budget_tokens": 64,
            "hot_tokens": 80 if mode == "tiered" else 0,
            # Five blocks of 16 tokens for each row, so that no row can grow.
            "hot_bytes": ROWS * 5 * 3 * 8 * (16 * 2 * 128 * 2 + 8),
            "max_rows": ROWS,
            "max_model_len": 1024,
            "max_step_tokens": 512,
        }
    )
    engine = OfflineEngine(settings, 2**28, model)
    for number in range(ROWS):
        prompt = [(number * 31 + i * i) % 9000 for i in range(300 + 17 * number)]
        engine.scheduler.submit([Sequence(str(number), 0, prompt, sampling, 7, 400)])
    while engine.scheduler.waiting or any(s.is_prefilling for s in engine.scheduler.running):
        engine.step()
    for _ in range(3):
        engine.step()
    return engine


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, top_p=0.9, top_k=50, frequency_penalty=0.2, logit_bias=((5, 1.0),)),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_decode_step_neither_allocates_nor_waits(model: CausalLM, mode: str, sampling: str) -> None:
    """Over 130 steps, so through edges of blocks and of pages."""
    engine = running(model, mode, SAMPLINGS[sampling])
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        for _ in range(130):
            engine.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert all(len(sequence.generated) > 130 for sequence in engine.scheduler.running)


def test_the_checks_can_fail() -> None:
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    something = torch.ones(3, device="cuda")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] > before
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchronizing"):
        something.sum().item()


def test_the_device_clock_adds_up(model: CausalLM) -> None:
    """Busy and idle time make up the time that passed, and a step that decodes is mostly its graph."""
    engine = running(model, "tiered", Sampling())
    clock = engine.runner.clock
    assert clock is not None
    before, began = clock.times, time.perf_counter_ns()
    for _ in range(100):
        engine.step()
    passed, after = time.perf_counter_ns() - began, clock.times
    assert after.steps - before.steps == 100
    busy, idle = after.busy_ns - before.busy_ns, after.idle_ns - before.idle_ns
    assert 0.8 * passed < busy + idle < 1.2 * passed
    assert 0.3 * busy < after.decode_ns - before.decode_ns < busy
    print(f"busy={busy / 1e6:.2f} ms idle={idle / 1e6:.2f} ms passed={passed / 1e6:.2f} ms")


def test_a_row_of_no_numbers_ends_alone(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ahead has its -1 for a token; the engine and the other rows go on."""
    poison = torch.zeros(batch_sizes(ROWS)[-1], 1, device=CUDA)
    sound = model.decode_logits
    monkeypatch.setattr(model, "decode_logits", lambda hidden: sound(hidden) + poison[: hidden.shape[0]])
    engine = running(model, "tiered", Sampling())
    everybody = list(engine.scheduler.running)
    poison[2] = float("nan")
    while not any(sequence.finish for sequence in everybody):
        engine.step()
    poison.zero_()
    said = [len(sequence.generated) for sequence in engine.scheduler.running]
    for _ in range(20):
        engine.step()
    torch.cuda.synchronize()
    [ended] = [sequence for sequence in everybody if sequence.finish]
    assert ended.finish is Finish.ERROR
    assert len(engine.scheduler.running) == ROWS - 1
    assert [len(sequence.generated) for sequence in engine.scheduler.running] == [n + 20 for n in said]
    assert all(token >= 0 for sequence in everybody for token in sequence.generated)
