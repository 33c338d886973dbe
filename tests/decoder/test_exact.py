"""The promise: only the place where KV lies changes, so `tiered` gives the tokens of `full`.

`full` is a paged cache without hot buffer or LRU; transformers' own dense attention is the second oracle.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.real_text import real_tokens
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence, TokenIds
from services.decoder.kernels.counter import Counter
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings
from tests.decoder.recording import Recording

ARENA_BYTES = 2 * 2**30
SHORT = (700, 900, 333)
LENGTHS = (1500, 700, 2100, 333, 1024, 16, 1777, 900)


def settings(model: Path, **changes: object) -> DecoderSettings:
    """Small blocks, and hot slots for one more than the budget where `max_rows` run: over 20% miss."""
    base: dict[str, object] = {
        "model": model,
        "block_tokens": 2,
        "budget_tokens": 66,
        "hot_tokens": 68,
        "max_step_tokens": 768,
        "window_tokens": 256,
    }
    return DecoderSettings.model_validate(base | changes)


def requests(model: Path, lengths: tuple[int, ...], tokens: int) -> list[Sequence]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [
        Sequence(
            str(i), 0, real_tokens(tokenizer, length, skip=3000 * i), Sampling(), seed=0, max_tokens=tokens
        )
        for i, length in enumerate(lengths)
    ]


def answers(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.generated for sequence in sequences]


def check_tiered_is_full(
    model: CausalLM, path: Path, lengths: tuple[int, ...], tokens: int, **more: object
) -> None:
    more = {"max_rows": len(lengths), **more}
    tiered = OfflineEngine(settings(path, kv_mode="tiered", **more), ARENA_BYTES, model)
    recording = Recording()
    ours = requests(path, lengths, tokens)
    recording.attach(tiered, ours)
    tiered.generate(ours)
    full = OfflineEngine(settings(path, kv_mode="full", hot_tokens=0, **more), ARENA_BYTES, model)
    theirs = requests(path, lengths, tokens)
    recording.replay(full.runner, theirs)

    assert answers(ours) == answers(theirs)
    assert all(len(answer) == tokens for answer in answers(ours))
    chosen, hits, misses, evictions, fetched = tiered.counters()[:, : Counter.NANOSECONDS].sum(0).tolist()
    print(f"batch={len(lengths)} tokens={tokens} chosen={chosen} miss_rate={misses / chosen:.3f}")
    assert hits + misses == chosen
    assert chosen == full.counters()[:, Counter.CHOSEN].sum()
    assert fetched == misses * tiered.plan.shape.block_bytes
    assert evictions > 0
    if min(lengths) > 300:
        assert misses > 0.2 * chosen, "the hot buffer was too comfortable to prove anything"
    tiered.scheduler.check_integrity()
    tiered.runner.residence.check_integrity()


@pytest.mark.parametrize("sharing", ["kv_head", "layer"])
def test_tiered_equals_full(model_fp32: CausalLM, default_model: Path, sharing: str) -> None:
    check_tiered_is_full(model_fp32, default_model, SHORT, 20, quest_sharing=sharing)


def test_tiered_equals_full_in_bf16(model_bf16: CausalLM, default_model: Path) -> None:
    check_tiered_is_full(model_bf16, default_model, SHORT, 20)


def test_exempt_layers_stay_resident(model_fp32: CausalLM, default_model: Path) -> None:
    """Dense first layers fetch each block once at most; the others go on missing."""
    engine = OfflineEngine(settings(default_model, dense_layers=2, max_rows=1), ARENA_BYTES, model_fp32)
    sequences = requests(default_model, (500,), 20)
    engine.generate(sequences)
    misses = engine.counters()[:, Counter.MISSES]
    blocks = (500 + 20) // 2 + 1
    assert (misses[:2] <= blocks * engine.plan.shape.groups).all()
    assert (engine.counters()[:2, Counter.EVICTIONS] == 0).all()
    assert (engine.counters()[2:, Counter.EVICTIONS] > 0).all()
    full = OfflineEngine(
        settings(default_model, kv_mode="full", hot_tokens=0, dense_layers=2), ARENA_BYTES, model_fp32
    )
    same = requests(default_model, (500,), 20)
    full.generate(same)
    assert answers(sequences) == answers(same)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_tiered_equals_full_over_300_tokens(model_fp32: CausalLM, default_model: Path, batch: int) -> None:
    check_tiered_is_full(model_fp32, default_model, LENGTHS[:batch], 300)


def test_alone_equals_in_a_batch(model_fp32: CausalLM, default_model: Path) -> None:
    lengths, tokens = SHORT, 16
    engine = OfflineEngine(settings(default_model), ARENA_BYTES, model_fp32)
    together = requests(default_model, lengths, tokens)
    engine.generate(together)
    for i, sequence in enumerate(requests(default_model, lengths, tokens)):
        engine.generate([sequence])
        assert sequence.generated == together[i].generated


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_alone_equals_in_a_batch_over_300_tokens(model_fp32: CausalLM, default_model: Path) -> None:
    engine = OfflineEngine(settings(default_model), ARENA_BYTES, model_fp32)
    together = requests(default_model, LENGTHS, 300)
    engine.generate(together)
    for i, sequence in enumerate(requests(default_model, LENGTHS, 300)):
        engine.generate([sequence])
        assert sequence.generated == together[i].generated


def dense_answer(path: Path, prompt: TokenIds, tokens: int) -> list[int]:
    """transformers' own dense attention and cache, greedy."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("selector", ["quest", "everything"])
def test_a_budget_of_everything_equals_transformers(
    model_fp32: CausalLM, default_model: Path, selector: str
) -> None:
    tokens = 32
    changes = {"budget_tokens": 2048, "hot_tokens": 0, "max_step_tokens": 256, "selector": selector}
    engine = OfflineEngine(settings(default_model, **changes), ARENA_BYTES, model_fp32)
    (sequence,) = requests(default_model, (700,), tokens)
    engine.generate([sequence])
    assert sequence.generated == dense_answer(default_model, sequence.prompt, tokens)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_budget_of_everything_equals_transformers_over_300_tokens(
    model_fp32: CausalLM, default_model: Path
) -> None:
    engine = OfflineEngine(settings(default_model, budget_tokens=4096, hot_tokens=0), ARENA_BYTES, model_fp32)
    (sequence,) = requests(default_model, (1500,), 300)
    engine.generate([sequence])
    assert sequence.generated == dense_answer(default_model, sequence.prompt, 300)
