"""Hits first on a GPU: time of a decode step with it and without, beside the bound of no fetches at all.

    python -m benchmarks.hits_first [--kinds gqa,mla] [--batches 1,8,32] [--layers N]

`gqa`: Qwen3-8B shapes, Quest with 2,048 tokens of 8K in blocks of 16, each KV head for itself. `mla`: the
slice of GLM-5.1 (glm_shapes.py) at 32K, whose choices no layers share, 2,048 single tokens. Random bf16
weights; a lane has hot slots for twice its choice. Choices walk around a ring, so that exactly the line's
share of them misses in each step; one engine goes through all shares. Times are whole engine steps, medians.
What can be won at most is the time that attention over the hits takes (docs/log.md).

Lines of kinds and batches that were not asked for stay in the result.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import decode_rig, glm_rig, report
from benchmarks.dealt_experts import DealtExperts
from benchmarks.glm_shapes import slice_config
from benchmarks.synthetic import synthetic_model, synthetic_spec
from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.offline import OfflineEngine
from services.decoder.kernels.counter import Counter
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.weights import random_weights

BUDGET = 2048
SHARES = (0.0, 0.07, 0.134, 0.25)
WARM_STEPS, STEPS = 12, 32
MODES = ("usual", "hits_first", "no_io")


class Kind(NamedTuple):
    """A model, and how much of it is looked at."""

    name: str  # gqa or mla
    model: CausalLM
    context: int  # tokens a row
    budget: int  # tokens a choice


def ring(lanes: int, blocks: int, width: int, misses: Sequence[int], device: torch.device) -> Tensor:
    """Choices of which a known number miss, in lanes that have slots for fewer than `blocks` blocks.

    Args:
        lanes: each has an order of its own.
        blocks: that a lane can choose from.
        width: chosen a step.
        misses: by step, how many have not been chosen before, or longer ago than any other.
        device: where.

    Returns:
        [steps, lanes, width] int32, ascending.
    """
    generator = torch.Generator(device).manual_seed(1)
    order = torch.rand(lanes, blocks, device=device, generator=generator).argsort(1).int()
    start = torch.tensor(misses, device=device).cumsum(0).unsqueeze(1)
    place = (start + torch.arange(width, device=device)) % blocks
    return order[:, place].transpose(0, 1).sort(2).values


def engine_of(kind: Kind, batch: int, mode: str, device: str = "cuda:0") -> OfflineEngine:
    """In the middle of answers of `batch` rows, about to go through SHARES."""
    spec, block_tokens = kind.model.spec, decode_rig.BLOCK_TOKENS if kind.name == "gqa" else 1
    top_k = kind.budget // block_tokens
    misses = [round(share * top_k) for share in SHARES for _ in range(WARM_STEPS + STEPS)]
    misses += [0] * 8  # steps that are planned ahead
    full_blocks = kind.context // block_tokens - 1
    lanes = batch * (spec.kv_heads if kind.name == "gqa" else 1)
    chosen = ring(lanes, full_blocks, top_k - 1, misses, torch.device(device))
    if kind.name == "gqa":
        return decode_rig.engine_in_mid_answer(
            kind.model,
            batch=batch,
            context=kind.context,
            budget=kind.budget,
            mode="tiered",
            skip_io=mode == "no_io",
            hits_first=mode == "hits_first",
            traced=chosen,
            device=device,
        )
    assert spec.latent is not None
    slot_bytes = spec.layers * spec.head_dim * kind.model.dtype.itemsize + 8 * len(set(spec.latent.anchors))
    return glm_rig.engine_in_mid_answer(
        kind.model,
        glm_rig.Trace(chosen, kind.context),
        rows=batch,
        context=kind.context,
        longest=-(-(kind.context + len(misses)) // 64) * 64,
        changes={
            "hot_tokens": 2 * top_k,
            "hot_bytes": 2 * top_k * batch * slot_bytes,
            "probe_no_io": mode == "no_io",
            "hits_first": mode == "hits_first",
        },
        device=device,
    )


def measured(engine: OfflineEngine) -> list[dict[str, float]]:
    """By share: the time of a step and what missed."""
    lines = []
    for share in SHARES:
        for _ in range(WARM_STEPS):
            engine.step()
        engine.runner.wait()
        engine.counters().zero_()
        taken = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            engine.step()  # the next one is under way behind it, as in a server
            taken.append(time.perf_counter() - begun)
        totals = engine.counters().sum(0).tolist()
        missed = totals[Counter.MISSES] / max(1, totals[Counter.CHOSEN])
        lines.append({"share": share, "missed": missed, "step_ms": 1e3 * statistics.median(taken)})
    return lines


def side_by_side(
    kind: str, batch: int, by_mode: Mapping[str, list[dict[str, float]]]
) -> list[dict[str, Any]]:
    """A line a share: each mode's step, what hits first saves, and how much of what was exposed that is."""
    lines = []
    for at, usual in enumerate(by_mode["usual"]):
        line: dict[str, Any] = {
            "kind": kind,
            "batch": batch,
            "share": usual["share"],
            "missed": usual["missed"],
        }
        line |= {f"{mode}_ms": of_mode[at]["step_ms"] for mode, of_mode in by_mode.items()}
        if "hits_first" in by_mode:
            line["saved_ms"] = line["usual_ms"] - line["hits_first_ms"]
        if "hits_first" in by_mode and "no_io" in by_mode:
            exposed = line["usual_ms"] - line["no_io_ms"]
            line["of_exposed"] = line["saved_ms"] / exposed if usual["share"] and exposed > 0 else None
        lines.append(line)
    return lines


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`old` without what `new` measured again."""
    again = {(line["kind"], line["batch"]) for line in new}
    return [*(line for line in old if (line["kind"], line["batch"]) not in again), *new]


def kind_of(name: str, layers: int) -> Kind:
    """On the first GPU; with `layers` layers if not 0."""
    device, dtype = torch.device("cuda:0"), torch.bfloat16
    if name == "gqa":
        return Kind(
            name, synthetic_model("qwen3-8b", device, dtype, layers, dense_ops(device))[1], 8192, BUDGET
        )
    changes = {"num_hidden_layers": layers} if layers else {}
    spec = synthetic_spec(slice_config("glm-5.1", **changes))
    weights = random_weights(spec, dtype, device, 0)
    DealtExperts(weights, device)
    model = CausalLM(spec, dtype, device, model=weights)
    return Kind(name, model, 32768, BUDGET)


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default="gqa,mla")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--layers", type=int, default=0, help="instead of the models' own numbers")
    wanted = parser.parse_args()
    path = report.RESULTS / "hits_first.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.is_file() else []
    best = 0.0
    for name in wanted.kinds.split(","):
        kind = kind_of(name, wanted.layers)
        for batch in map(int, wanted.batches.split(",")):
            by_mode = {}
            for mode in MODES:
                engine = engine_of(kind, batch, mode)
                by_mode[mode] = measured(engine)
                del engine
                gc.collect()
                torch.cuda.empty_cache()
            lines = side_by_side(name, batch, by_mode)
            for line in lines:
                print("  ".join(f"{key}={_short(value)}" for key, value in line.items()), flush=True)
                best = max(best, line["saved_ms"] / line["usual_ms"])
            rows = merged(rows, lines)
            report.write("hits_first", {**report.gpu(), "layers": wanted.layers, "rows": rows})
        del kind
        gc.collect()
        torch.cuda.empty_cache()
    print(f"hits_first_best={100 * best:.1f} %")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
