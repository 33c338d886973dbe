"""The slice of GLM: its arithmetic against the engine's own, its trace against the published figures."""

from __future__ import annotations

import pytest
import torch

from benchmarks.dealt_experts import DealtExperts
from benchmarks.glm_rig import Trace, engine_in_mid_answer
from benchmarks.glm_shapes import (
    SHARING,
    SliceMemory,
    levels,
    rank_weight_bytes,
    slice_config,
    whole_config,
)
from benchmarks.glm_slice import FIXED, cases_of, compared, measured, merged, settings_of, sum_name, summary
from benchmarks.selection_trace import choices
from benchmarks.synthetic import synthetic_spec
from services.decoder.kernels.index_code import decode_keys
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.weights import random_weights

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, META = torch.device("cpu"), torch.device("meta")
H200_BYTES = 143_771 * 2**20
CONTEXT, LONGEST, TOP_K = 150, 320, 16
TINY: dict[str, object] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "index_head_dim": 32,
    "index_topk": TOP_K,
    "num_hidden_layers": 4,
    "vocab_size": 211,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def model() -> CausalLM:
    spec = synthetic_spec(slice_config("glm-5.2", **TINY))
    return CausalLM(spec, torch.float32, CPU, model=random_weights(spec, torch.float32, CPU, 0))


def tiny_memory(rows: int, slots: int) -> SliceMemory:
    """Of TINY in float32, with room for exactly so many rows."""
    config = slice_config("glm-5.2", **TINY)
    one = SliceMemory.of(config, whole_config("glm-5.2"), H200_BYTES, LONGEST, itemsize=4)
    kv_bytes = rows * (one.resident_bytes + slots * one.slot_bytes)
    return SliceMemory(kv_bytes, LONGEST, one.record_bytes, one.index_bytes, one.table_bytes, one.slot_bytes)


@pytest.mark.parametrize("name", SHARING)
def test_a_ranks_weights_are_the_models(name: str) -> None:
    """Of a model without dealt-out experts and of one GPU, which a fraction of the layers stands for."""
    changes: dict[str, object] = {"num_hidden_layers": 4, "n_routed_experts": 8, "vocab_size": 1024}
    config = slice_config(name, **changes)
    spec = synthetic_spec(config)
    module = random_weights(spec, torch.bfloat16, META, 0)
    parts = {"expert": 0, "embedding": 0, "other": 0}
    for parameter_name, parameter in module.named_parameters():
        kind = "expert" if ".experts." in parameter_name else "other"
        kind = "embedding" if "embed_tokens" in parameter_name or "lm_head" in parameter_name else kind
        if parameter.dim() > 1:
            parts[kind] += parameter.numel()
    expected = parts["expert"] // 8 + parts["embedding"] * 2 // 8 + parts["other"]
    counted = rank_weight_bytes(config)
    assert 0 <= expected - counted < 0.002 * expected, "router and weights of index heads are left out"


def test_capacities_are_those_of_the_deployment() -> None:
    """Rows that fit, by hand: 5.16 GB; a token keeps 13,824 B, 3,072 B of index and 48 B of tables."""
    memory = SliceMemory.of(slice_config("glm-5.1"), whole_config("glm-5.1"), H200_BYTES, 33_640)
    assert memory.kv_bytes == pytest.approx((0.94 * H200_BYTES - 108.17e9) * 12 / 78, rel=1e-3)
    assert (memory.record_bytes, memory.index_bytes, memory.table_bytes) == (13_824, 3_072, 48)
    assert memory.full_rows == int(5.1598e9 / (33_640 * 16_896)) == 9
    assert memory.tiered_rows(FIXED) == int(5.1598e9 / (33_640 * 3_120 + 4096 * 13_920)) == 31
    coded = SliceMemory.of(slice_config("glm-5.1"), whole_config("glm-5.1"), H200_BYTES, 33_640, coded=True)
    assert (coded.index_bytes, coded.tiered_rows(FIXED)) == (12 * 144, 44)
    eight_bits = SliceMemory.of(
        slice_config("glm-5.1"), whole_config("glm-5.1"), H200_BYTES, 33_640, coded=True, records_coded=True
    )
    assert (eight_bits.record_bytes, eight_bits.slot_bytes) == (12 * 656, 12 * 664)
    assert eight_bits.full_rows == int(5.1598e9 / (33_640 * 12 * (656 + 144))) == 15
    assert eight_bits.tiered_rows(FIXED) == int(5.1598e9 / (33_640 * 1_776 + 4096 * 12 * 664)) == 55
    shared = SliceMemory.of(slice_config("glm-5.2"), whole_config("glm-5.2"), H200_BYTES, 33_640)
    assert shared.index_bytes * 4 == memory.index_bytes
    assert list(whole_config("glm-5.2").indexer_types).count("full") == 21
    assert list(slice_config("glm-5.2").indexer_types).count("full") == 3
    rows = memory.tiered_rows(FIXED)
    assert rows * FIXED * memory.slot_bytes <= memory.elastic_bytes(rows)
    assert memory.elastic_bytes(rows + 1) < (rows + 1) * FIXED * memory.slot_bytes


def test_levels_reach_the_limit() -> None:
    assert levels(31, (9,)) == [31, 16, 9, 8, 4, 2, 1]
    assert levels(1) == [1]
    assert levels(2, (5,)) == [2, 1]


@pytest.mark.parametrize("mode", ["full", "tiered"])
def test_a_row_takes_what_was_counted(model: CausalLM, mode: str) -> None:
    memory = tiny_memory(rows=3, slots=40)
    trace = Trace(choices(3, CONTEXT, TOP_K - 1, LONGEST - CONTEXT, CPU), CONTEXT)
    changes: dict[str, object] = {"kv_mode": mode}
    if mode == "tiered":
        changes |= {"hot_tokens": 40, "hot_bytes": memory.elastic_bytes(3)}
    engine = engine_in_mid_answer(
        model, trace, rows=3, context=CONTEXT, longest=LONGEST, changes=changes, device="cpu"
    )
    plan = engine.plan
    assert plan.index_bytes == 3 * LONGEST * memory.index_bytes
    if mode == "full":
        assert plan.resident_bytes == 3 * LONGEST * memory.record_bytes
        return
    assert plan.hot_bytes == 3 * 40 * memory.record_bytes
    tables = plan.table_bytes - 3 * 40 * (memory.slot_bytes - memory.record_bytes)
    small = 4 * 3 * 2 * plan.max_pages + 4 * 3 * (plan.hot_classes[0].most + 1)
    assert tables - small == 3 * LONGEST * memory.table_bytes


def test_the_bound_is_measured_wherever_a_mode_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.glm_slice.FIXED", TOP_K + 1)
    memory = tiny_memory(rows=12, slots=TOP_K + 1)
    kinds = {(case.mode, case.capacity) for case in cases_of(memory, ["sync", "no_io"], shares=True)}
    assert kinds == {(mode, capacity) for mode in ("sync", "no_io") for capacity in ("elastic", "17")}
    assert {case.mode for case in cases_of(memory, ["sync"], shares=True)} == {"sync"}


@pytest.mark.parametrize("mode", ["full", "tiered"])
def test_a_row_in_eight_bits_takes_what_was_counted(mode: str) -> None:
    """Records and index keys; no key that was made up is none."""
    tiny = {**TINY, "kv_lora_rank": 128}
    config = slice_config("glm-5.2", **tiny)
    spec = synthetic_spec(config)
    model = CausalLM(spec, torch.float32, CPU, model=random_weights(spec, torch.float32, CPU, 0))
    whole = whole_config("glm-5.2")
    memory = SliceMemory.of(config, whole, H200_BYTES, LONGEST, coded=True, records_coded=True)
    trace = Trace(choices(3, CONTEXT, TOP_K - 1, LONGEST - CONTEXT, CPU), CONTEXT)
    changes: dict[str, object] = {"kv_mode": mode, "index_dtype": "float8", "record_dtype": "float8"}
    if mode == "tiered":
        changes |= {"hot_tokens": 40, "hot_bytes": 3 * 40 * memory.slot_bytes}
    engine = engine_in_mid_answer(
        model, trace, rows=3, context=CONTEXT, longest=LONGEST, changes=changes, device="cpu"
    )
    plan, index = engine.plan, engine.runner.index
    assert plan.index_bytes == 3 * LONGEST * memory.index_bytes
    assert memory.record_bytes == 4 * 176
    tokens = 3 * LONGEST if mode == "full" else 3 * 40
    assert plan.resident_bytes + plan.hot_bytes == tokens * memory.record_bytes
    assert index is not None
    keys = decode_keys(index.pool.view(-1, 32 + 16))
    assert bool(keys.isfinite().all())
    assert 0.9 < float(keys.std()) < 1.1
    engine.step()
    assert all(len(sequence.generated) > 1 for sequence in engine.scheduler.running)


@pytest.mark.parametrize("mode", ["full", "sync", "prefetch", "hits_first"])
def test_lines_of_a_case(model: CausalLM, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows step by step; they miss what the trace says, and never where everything is resident."""
    monkeypatch.setattr("benchmarks.glm_slice.WARM_STEPS", 6)
    monkeypatch.setattr("benchmarks.glm_slice.STEPS", 4)
    monkeypatch.setattr("benchmarks.glm_slice.FIXED", TOP_K + 1)
    memory = tiny_memory(rows=12 if mode == "full" else 3, slots=TOP_K + 1)
    case = next(case for case in cases_of(memory, [mode], shares=True) if case.mode == mode)
    assert case.levels[0] == (2 if mode == "full" else 3)
    trace = Trace(choices(case.levels[0], CONTEXT, TOP_K - 1, LONGEST - CONTEXT, CPU), CONTEXT)
    rows, changes = case.levels[0], settings_of(case, memory)
    engine = engine_in_mid_answer(
        model, trace, rows=rows, context=CONTEXT, longest=LONGEST, changes=changes, device="cpu"
    )
    lines = list(measured(engine, case))
    assert [line["concurrency"] for line in lines] == case.levels
    assert len(engine.scheduler.running) == 1
    for line in lines:
        assert line["tok_s"] == pytest.approx(1e3 * line["concurrency"] / line["tpot_ms"])
    if mode == "full":
        assert not any(line["misses_a_row"] for line in lines)
    else:
        assert lines[0]["misses_a_row"] > lines[-1]["misses_a_row"], "who is alone has more slots"


def test_what_is_exposed_and_what_is_best() -> None:
    def line(mode: str, capacity: str, rows: int, tok_s: float, tpot_ms: float) -> dict[str, object]:
        told = {"mode": mode, "capacity": capacity, "concurrency": rows}
        return {**told, "tok_s": tok_s, "tpot_ms": tpot_ms}

    lines = [
        line("full", "all", 2, 100.0, 20.0),
        line("sync", "elastic", 2, 90.0, 22.0),
        line("sync", "elastic", 8, 320.0, 25.0),
        line("sync", "4096", 8, 310.0, 26.0),
        line("no_io", "elastic", 8, 400.0, 20.0),
    ]
    assert [line["exposed_fetch_ms"] for line in compared(lines)] == [0.0, 0.0, 5.0, 0.0, 0.0]
    assert [line["of_bound"] for line in lines] == [None, None, 0.8, None, None], "a bound of its own kind"
    compared([*lines, line("no_io", "4096", 8, 390.0, 20.8)])
    assert lines[3]["of_bound"] == pytest.approx(0.8)
    assert summary(lines)["sync_over_full"] == 3.2
    assert "sync_over_full" not in summary(lines[1:])


def test_a_part_of_a_run_leaves_the_others_lines() -> None:
    def line(model: str, mode: str, tok_s: float) -> dict[str, object]:
        return {"model": model, "context": 32, "mode": mode, "capacity": "all", "tok_s": tok_s}

    kept = merged([line("a", "full", 1), line("a", "sync", 2), line("b", "full", 3)], [line("a", "full", 4)])
    assert kept == [line("a", "sync", 2), line("b", "full", 3), line("a", "full", 4)]
    exact = [line("a", "full", 1), line("a", "full", 2) | {"record_dtype": "auto"}]
    coded = line("a", "full", 3) | {"record_dtype": "float8"}
    assert merged(exact[:1], [coded]) == [exact[0], coded], "records in eight bits are lines of their own"
    assert merged([exact[0], coded], [exact[1]]) == [coded, exact[1]]
    assert sum_name("a", 32, "auto") == "a:32"
    assert sum_name("a", 32, "float8") == "a:32:float8"


def test_the_trace_changes_as_fast_as_published() -> None:
    """30% of a choice is new (B = k in the paper's table), the newest token and one step apart."""
    chosen = choices(1, 100_384, 2_047, 9, CPU)[:, 0]
    assert chosen.shape == (9, 2_047)
    assert bool((chosen[:, 1:] > chosen[:, :-1]).all())
    assert bool((chosen[:, :4] == torch.arange(4)).all()), "the first tokens are always chosen"
    new = [1 - torch.isin(chosen[i], chosen[i - 1]).float().mean().item() for i in range(1, 9)]
    assert sum(new) / len(new) == pytest.approx(0.30, abs=0.02)


def test_experts_are_dealt_evenly_whatever_is_said() -> None:
    """The same token everywhere, and still every expert; other ones in the next step."""
    config = slice_config("glm-5.2", **TINY)
    spec = synthetic_spec(config)
    weights = random_weights(spec, torch.float32, CPU, 0)
    routers = [module for module in weights.modules() if hasattr(module, "e_score_correction_bias")]
    told: list[tuple[torch.Tensor, ...]] = []
    DealtExperts(weights, CPU)
    same = torch.ones(64, config.hidden_size)
    for _ in range(2):
        told += [router(same) for router in routers]
    first, second = told[0][2], told[len(routers)][2]
    assert len(routers) > 1
    assert first.shape == (64, config.num_experts_per_tok)
    assert all(len(set(row)) == len(row) for row in first.tolist())
    assert set(first.flatten().tolist()) == set(range(config.n_routed_experts))
    assert not torch.equal(first, second)
    assert not torch.equal(first, told[1][2])
