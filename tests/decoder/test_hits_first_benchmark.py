"""The benchmark of hits first: its choices miss as they say, and both of its kinds run on a tiny model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from benchmarks import decode_rig, hits_first
from benchmarks.glm_shapes import slice_config
from benchmarks.hits_first import SHARES, Kind, engine_of, measured, merged, ring, side_by_side
from benchmarks.synthetic import synthetic_spec
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.weights import random_weights
from tests.decoder.checkpoints import COMMON, TWISTS
from tests.decoder.test_glm_slice import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def kind_of(name: str) -> Kind:
    """As the benchmark's, in small: 40 blocks or 150 tokens, of which 8 or 16 are chosen."""
    if name == "gqa":
        config = AutoConfig.for_model(
            "qwen3", **{**COMMON, **TWISTS["qwen3"], "max_position_embeddings": 1024}
        )
        context, budget = 40 * decode_rig.BLOCK_TOKENS, 8 * decode_rig.BLOCK_TOKENS
    else:
        config = slice_config("glm-5.1", **TINY)
        context, budget = 150, 16
    spec = synthetic_spec(config)
    model = CausalLM(spec, torch.float32, CPU, model=random_weights(spec, torch.float32, CPU, 0))
    return Kind(name, model, context, budget)


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_both_ways_miss_what_the_line_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits_first, "WARM_STEPS", 6)
    monkeypatch.setattr(hits_first, "STEPS", 4)
    kind = kind_of(name)
    by_mode = {mode: measured(engine_of(kind, 2, mode, "cpu")) for mode in ("usual", "hits_first")}
    lines = side_by_side(name, 2, by_mode)
    assert [line["share"] for line in lines] == list(SHARES)
    top_k = {"gqa": 8, "mla": 16}[name]
    for line in lines:
        assert line["missed"] == pytest.approx(round(line["share"] * top_k) / top_k, abs=1e-9)
        assert line["saved_ms"] == line["usual_ms"] - line["hits_first_ms"]
    assert [line["missed"] for line in by_mode["hits_first"]] == [line["missed"] for line in lines]


def test_a_ring_brings_what_was_chosen_longest_ago() -> None:
    misses = [0, 0, 3, 3, 0, 1, 4]
    chosen = ring(2, 12, 5, misses, CPU)
    assert chosen.shape == (7, 2, 5)
    assert chosen.dtype == torch.int32
    assert bool((chosen[:, :, 1:] > chosen[:, :, :-1]).all())
    for lane in range(2):
        last = dict.fromkeys(range(12), -1)  # step of each block's latest choice
        for step, new in enumerate(misses):
            now = set(chosen[step, lane].tolist())
            entering = {block for block in now if last[block] != step - 1}
            if step:
                assert len(entering) == new
                waiting = sorted(last[block] for block in last if last[block] != step - 1)
                assert sorted(last[block] for block in entering) == waiting[:new]
            last |= dict.fromkeys(now, step)


def test_what_is_saved_of_what_was_exposed() -> None:
    def mode(*steps: float) -> list[dict[str, float]]:
        return [
            {"share": share, "missed": share, "step_ms": ms}
            for share, ms in zip((0.0, 0.1), steps, strict=True)
        ]

    by_mode = {"usual": mode(4, 8), "hits_first": mode(5, 7), "no_io": mode(4, 6)}
    none, some = side_by_side("gqa", 8, by_mode)
    assert (none["saved_ms"], none["of_exposed"]) == (-1, None)
    assert (some["saved_ms"], some["of_exposed"]) == (1, 0.5)
    again = {**some, "saved_ms": 2}
    other = {**none, "batch": 1}
    assert merged([none, other, some], [again]) == [other, again]
