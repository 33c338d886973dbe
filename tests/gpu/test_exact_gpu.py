"""The promise on the GPU: `tiered` gives the tokens of `full`, graphs those of eager launches.

A row's share of the hot buffer is one block more than the budget and blocks are small, so that over 20% of
the choices miss. test_elastic_gpu.py is about rows whose shares change. The oracles are full residency and
transformers' own dense attention, with the bundled model on real prose.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.real_text import real_tokens
from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.models.bundled.directory import default_model
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.decoder.recording import Recording

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
CONTEXT = 7600
EDGES = (16, 333, 63, 64, 67, 65, 130, 134, 136, 2100, 68)
"""Lengths about the capacity of 68 tokens, pages' edges, and some that grow past them while they decode."""


@pytest.fixture(scope="module")
def path() -> Path:
    return default_model()


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(path: Path, request: pytest.FixtureRequest) -> CausalLM:
    dtype: torch.dtype = request.param
    return CausalLM(ModelSpec.read(path), dtype, CUDA, dense=dense_ops(CUDA))


def engine(model: CausalLM, rows: int, **changes: object) -> OfflineEngine:
    base: dict[str, object] = {
        "model": model.spec.path,
        "device": "cuda:0",
        "block_tokens": 2,
        "budget_tokens": 66,
        "hot_tokens": 68,
        "max_rows": rows,
        "max_model_len": 8192,
        "max_step_tokens": max(2048, 1024 * rows),  # who is early has everybody's slots until the others come
    }
    spec = model.spec
    block_bytes = 2 * 2 * spec.head_dim * model.dtype.itemsize  # keys and values of two tokens
    if (base | changes)["hot_tokens"] == 68:
        base["hot_bytes"] = rows * 34 * spec.layers * spec.kv_heads * (block_bytes + 8)
    settings = DecoderSettings.model_validate(base | changes)
    # Bounds of 2-token blocks take half as much as the records.
    row_bytes = 1.6 * 8192 * model.spec.layers * model.spec.kv_heads * 2 * model.spec.head_dim * 4
    return OfflineEngine(settings, 2**28 + int(rows * row_bytes), model)


def requests(path: Path, lengths: Iterable[int], tokens: int) -> list[Sequence]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [
        Sequence(
            str(i),
            0,
            real_tokens(tokenizer, length, skip=2900 * i),
            Sampling(),
            seed=0,
            max_tokens=tokens,
            # Forced for half of the answer, because a greedy one that loops hardly misses.
            known=real_tokens(tokenizer, tokens // 2, skip=2900 * i + length) if i % 2 else [],
        )
        for i, length in enumerate(lengths)
    ]


def answers(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.generated for sequence in sequences]


@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_tiered_equals_full_by_graph_and_by_launches(model: CausalLM, path: Path, rows: int) -> None:
    check_all_ways_agree(model, path, (CONTEXT,) * rows, 400)


def test_about_the_edges(model: CausalLM, path: Path) -> None:
    check_all_ways_agree(model, path, EDGES, 150)


def check_all_ways_agree(model: CausalLM, path: Path, lengths: tuple[int, ...], tokens: int) -> None:
    """Tiered by graphs is recorded; full by graphs, full and tiered by launches replay its schedule."""
    rows = len(lengths)
    tiered = engine(model, rows)
    recording = Recording()
    ours = requests(path, lengths, tokens)
    recording.attach(tiered, ours)
    tiered.generate(ours)
    chosen, hits, misses, evictions, fetched = tiered.counters()[:, : Counter.NANOSECONDS].sum(0).tolist()
    print(f"{model.dtype} rows={rows} tokens={tokens} chosen={chosen} miss_rate={misses / chosen:.3f}")
    assert hits + misses == chosen
    assert fetched == misses * tiered.plan.shape.block_bytes
    assert evictions > 0
    if min(lengths) > 300:
        assert misses > 0.2 * chosen, "the hot buffer was too comfortable to prove anything"
    assert all(len(answer) == tokens for answer in answers(ours))
    tiered.scheduler.check_integrity()
    tiered.runner.residence.check_integrity()

    for changes in (
        {"kv_mode": "full", "hot_tokens": 0},
        {"kv_mode": "full", "hot_tokens": 0, "decode_graphs": False},
        {"decode_graphs": False},
    ):
        other = engine(model, rows, **changes)
        theirs = requests(path, lengths, tokens)
        recording.replay(other.runner, theirs)
        assert answers(ours) == answers(theirs), changes
        assert chosen == int(other.counters()[:, Counter.CHOSEN].sum())
        del other


@pytest.mark.parametrize("model", [torch.float32], indirect=True, ids=["fp32"])
def test_alone_equals_in_padded_batches(model: CausalLM, path: Path) -> None:
    tokens = 64
    together = requests(path, EDGES, tokens)
    engine(model, len(EDGES)).generate(together)
    one = engine(model, 1)
    for i, sequence in enumerate(requests(path, EDGES, tokens)):
        one.generate([sequence])
        assert sequence.generated == together[i].generated


@pytest.mark.parametrize("model", [torch.float32], indirect=True, ids=["fp32"])
@pytest.mark.parametrize("selector", ["quest", "everything"])
@pytest.mark.parametrize("kv_mode", ["tiered", "full"])
def test_a_budget_of_everything_equals_transformers(
    model: CausalLM, path: Path, selector: str, kv_mode: str
) -> None:
    tokens, context = 300, 1500
    ours = engine(
        model,
        1,
        kv_mode=kv_mode,
        selector=selector,
        block_tokens=16,
        budget_tokens=2048,
        hot_tokens=0,
        max_model_len=2048,
    )
    (sequence,) = requests(path, (context,), tokens)
    ours.generate([sequence])
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, device_map=CUDA)
    prompt = torch.tensor([sequence.prompt], device=CUDA)
    with torch.inference_mode():
        out = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
    assert sequence.generated == out[0, context:].tolist()
