"""The promise on the GPU: `tiered` gives the tokens of `full`, graphs those of eager launches.

The hot buffer is one block larger than the budget and blocks are small, so that over 20% of the choices miss.
The oracles are full residency and transformers' own dense attention, with the bundled model on real prose.
"""

from __future__ import annotations

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
TOKENS = 400
LENGTHS = (CONTEXT, 901, 333, 16, 2100, 64, 65, 63, 130, 132, 134)
"""Of the rows; what follows repeats. Short ones grow past the capacity of 66 tokens while they decode."""


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
        "budget_tokens": 64,
        "hot_tokens": 66,
        "max_rows": rows,
        "max_model_len": 8192,
        "max_step_tokens": 2048,
    }
    settings = DecoderSettings.model_validate(base | changes)
    return OfflineEngine(settings, 16 * 2**30, model)


def requests(path: Path, rows: int, tokens: int, first: int = CONTEXT) -> list[Sequence]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    lengths = [first, *(LENGTHS[i % len(LENGTHS)] for i in range(1, rows))]
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
    tiered = engine(model, rows)
    recording = Recording()
    ours = requests(path, rows, TOKENS)
    recording.attach(tiered, ours)
    tiered.generate(ours)
    chosen, hits, misses, evictions, fetched = tiered.counters()[:, : Counter.NANOSECONDS].sum(0).tolist()
    print(f"{model.dtype} rows={rows} tokens={TOKENS} chosen={chosen} miss_rate={misses / chosen:.3f}")
    assert hits + misses == chosen
    assert fetched == misses * tiered.plan.shape.block_bytes
    assert evictions > 0
    assert misses > 0.2 * chosen, "the hot buffer was too comfortable to prove anything"
    tiered.scheduler.check_integrity()
    tiered.runner.residence.check_integrity()

    for changes in (
        {"kv_mode": "full", "hot_tokens": 0},
        {"kv_mode": "full", "hot_tokens": 0, "decode_graphs": False},
        {"decode_graphs": False},
    ):
        other = engine(model, rows, **changes)
        theirs = requests(path, rows, TOKENS)
        recording.replay(other.runner, theirs)
        assert answers(ours) == answers(theirs), changes
        assert chosen == int(other.counters()[:, Counter.CHOSEN].sum())
        del other


@pytest.mark.parametrize("model", [torch.float32], indirect=True, ids=["fp32"])
def test_alone_equals_in_padded_batches(model: CausalLM, path: Path) -> None:
    tokens = 64
    together = requests(path, 9, tokens, first=1500)
    engine(model, 9).generate(together)
    one = engine(model, 1)
    for i, sequence in enumerate(requests(path, 9, tokens, first=1500)):
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
    (sequence,) = requests(path, 1, tokens, first=context)
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
