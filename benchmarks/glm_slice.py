"""One GPU's share of GLM-5.1 / 5.2 on eight, decoding at fixed lengths: what KV in host memory is worth.

    python -m benchmarks.glm_slice [--models glm-5.1,glm-5.2] [--contexts 32768,163840] [--modes full,...]
        [--record-dtype auto|float8]

Real shapes, random bf16 weights, 12 of 78 layers with 1/8 of the experts, and 12/78 of the memory that a GPU
of the deployment has left for KV (glm_shapes.py). The router picks its 8 experts among the 32 that are here,
and its choice is replaced by an even deal (dealt_experts.py).
The indexer runs; its choice is replaced by a trace that misses as the published model does
(selection_trace.py). One GPU has the host link to itself here, where eight share two sockets' memory.

Modes: `full`; `sync`, tiered with every fetch in its turn; `prefetch`, those of layers that share a choice
ahead of it; `hits_first`, attention over what is resident meanwhile; `no_io`, the bound: the same
bookkeeping, no bytes. Rows are elastic, down to 4,096 hot slots each; lines with capacity 4096 have exactly
as many. Records in eight bits, which are not exact, make lines of their own, beside the `full` of their kind.
A run of one model fits ten minutes; lines of models, contexts and records that were not asked for stay in the
result.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.dealt_experts import DealtExperts
from benchmarks.glm_rig import Trace, engine_in_mid_answer, shed
from benchmarks.glm_shapes import SHARING, SliceMemory, levels, slice_config, whole_config
from benchmarks.selection_trace import choices
from benchmarks.synthetic import synthetic_spec
from services.decoder.engine.offline import OfflineEngine
from services.decoder.kernels.counter import Counter
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.weights import random_weights

FIXED = 4096
WARM_STEPS, STEPS = 40, 32
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "full": {"kv_mode": "full"},
    "sync": {"prefetch": False},
    "prefetch": {},
    "hits_first": {"hits_first": True},
    "no_io": {"probe_no_io": True},
}
MOST_LEVELS = 12
GOALS = {("glm-5.1", 32768): 3.1, ("glm-5.1", 163840): 2.9}  # best tok/s of tiered over best of full


class Case(NamedTuple):
    """One engine: the rows it begins with, and those it is measured with."""

    mode: str
    capacity: str  # of a row: all, elastic or 4096 slots
    levels: list[int]


def cases_of(memory: SliceMemory, modes: Sequence[str], *, shares: bool) -> list[Case]:
    """What fits; without shared choices nothing can be fetched ahead."""
    full, tiered = memory.full_rows, memory.tiered_rows(FIXED)
    found = []
    for mode in modes:
        if mode == "full":
            if full:
                found.append(Case(mode, "all", levels(full)))
        elif (shares or mode != "prefetch") and tiered:
            found.append(Case(mode, "elastic", levels(tiered, (full,))))
    best = next((mode for mode in ("prefetch", "sync") if any(case.mode == mode for case in found)), None)
    if best is not None:  # and their bound: with exactly so many slots no row is resident whole
        fixed = [best, *(mode for mode in modes if mode == "no_io")]
        found += [Case(mode, str(FIXED), [rows]) for mode in fixed for rows in sorted({full, tiered} - {0})]
    return found


def settings_of(case: Case, memory: SliceMemory) -> dict[str, object]:
    """Of the case's engine."""
    rows = case.levels[0]
    changes = dict(SETTINGS[case.mode])
    if case.mode == "full":
        return changes
    hot_bytes = memory.elastic_bytes(rows) if case.capacity == "elastic" else rows * FIXED * memory.slot_bytes
    return changes | {"hot_tokens": FIXED, "hot_bytes": hot_bytes}


def measured(engine: OfflineEngine, case: Case) -> Iterator[dict[str, Any]]:
    """A line a level, the most rows first; in between the last rows end, and the others get their slots."""
    for rows in case.levels:
        shed(engine, rows)
        for _ in range(WARM_STEPS):
            engine.step()
        engine.counters().zero_()
        taken = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            engine.step()  # the next one is under way behind it, as in a server
            taken.append(time.perf_counter() - begun)
        totals = engine.counters().sum(0).tolist()
        seconds = statistics.median(taken)
        yield {
            "mode": case.mode,
            "capacity": case.capacity,
            "concurrency": rows,
            "tok_s": rows / seconds,
            "tpot_ms": 1e3 * seconds,
            "misses_a_row": totals[Counter.MISSES] / (rows * STEPS),
            "waited_ms": totals[Counter.NANOSECONDS] / STEPS / 1e6,
        }


def compared(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines with exposed fetch time and share of the bound, where the bound was measured."""
    bound = {
        (line["capacity"], line["concurrency"]): line["tpot_ms"] for line in lines if line["mode"] == "no_io"
    }
    for line in lines:
        at = bound.get((line["capacity"], line["concurrency"]))
        tiered = line["mode"] in ("sync", "prefetch", "hits_first")
        line["exposed_fetch_ms"] = line["tpot_ms"] - at if tiered and at is not None else 0.0
        line["of_bound"] = at / line["tpot_ms"] if tiered and at is not None else None
    return lines


def summary(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Best tokens a second by mode, and their ratio to `full`'s."""
    best: dict[str, float] = {}
    for line in lines:
        best[line["mode"]] = max(best.get(line["mode"], 0.0), line["tok_s"])
    ratios = {f"{mode}_over_full": value / best["full"] for mode, value in best.items() if "full" in best}
    return {**{f"{mode}_tok_s": value for mode, value in best.items()}, **ratios}


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`old` without what `new` measured again."""

    def case(line: dict[str, Any]) -> tuple[object, ...]:
        own = tuple(line[name] for name in ("model", "context", "mode", "capacity"))
        return *own, line.get("record_dtype", "auto")

    again = {case(line) for line in new}
    return [*(line for line in old if case(line) not in again), *new]


def sum_name(model: str, context: int, record_dtype: str) -> str:
    """Of what a context comes to."""
    return f"{model}:{context}" + ("" if record_dtype == "auto" else f":{record_dtype}")


def run(
    name: str, contexts: list[int], modes: list[str], dtypes: Mapping[str, str]
) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """One model's lines, and what they come to, context by context; `dtypes` are settings of index keys and
    records.
    """
    device, dtype = torch.device("cuda:0"), torch.bfloat16
    config, whole = slice_config(name), whole_config(name)
    spec = synthetic_spec(config)
    weights = random_weights(spec, dtype, device, 0)
    DealtExperts(weights, device)
    model = CausalLM(spec, dtype, device, model=weights)
    total = torch.cuda.get_device_properties(device).total_memory
    steps = MOST_LEVELS * (WARM_STEPS + STEPS) + 8
    for context in contexts:
        longest = -(-(context + steps) // 64) * 64
        coded = {name: dtype == "float8" for name, dtype in dtypes.items()}
        memory = SliceMemory.of(
            config,
            whole,
            total,
            longest,
            coded=coded["index_dtype"],
            records_coded=coded["record_dtype"],
        )
        cases = cases_of(memory, modes, shares=bool(SHARING[name]))
        most = max((case.levels[0] for case in cases), default=0)
        print(f"{name} at {context}: {memory.kv_bytes / 1e9:.2f} GB of KV, {memory.full_rows} rows in full, "
              f"{memory.tiered_rows(FIXED)} tiered", flush=True)  # fmt: skip
        chosen = choices(most, context, config.index_topk - 1, steps, device)
        lines = []
        for case in cases:
            begun = time.perf_counter()
            engine = engine_in_mid_answer(
                model,
                Trace(chosen[:, : case.levels[0]].contiguous(), context),
                rows=case.levels[0],
                context=context,
                longest=longest,
                changes={**settings_of(case, memory), **dtypes},
            )
            for line in measured(engine, case):
                line |= {"model": name, "context": context, **dtypes}
                print("  ".join(f"{key}={_short(value)}" for key, value in line.items()), flush=True)
                lines.append(line)
            print(f"{case.mode} {case.capacity}: {time.perf_counter() - begun:.0f} s", flush=True)
            del engine
            gc.collect()
            torch.cuda.empty_cache()
        for line in compared(lines):
            if line["of_bound"] is not None:
                told = f"exposed_fetch_ms={line['exposed_fetch_ms']:.3g}  of_bound={line['of_bound']:.3f}"
                print(f"{line['mode']} {line['capacity']} {line['concurrency']}: {told}", flush=True)
        yield lines, {sum_name(name, context, dtypes["record_dtype"]): summary(lines)}


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(SHARING))
    parser.add_argument("--contexts", default="32768,163840")
    parser.add_argument("--modes", default=",".join(SETTINGS))
    parser.add_argument("--index-dtype", default="float8", choices=("auto", "float8"))
    parser.add_argument("--record-dtype", default="auto", choices=("auto", "float8"))
    wanted = parser.parse_args()
    contexts = [int(context) for context in wanted.contexts.split(",")]
    path = report.RESULTS / "glm_slice.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": [], "sums": {}}
    for name in wanted.models.split(","):
        dtypes = {"index_dtype": wanted.index_dtype, "record_dtype": wanted.record_dtype}
        note = "one GPU, which has the host link to itself; bf16 weights, and records where lines say auto"
        for rows, sums in run(name, contexts, wanted.modes.split(","), dtypes):
            known = {"rows": merged(known["rows"], rows), "sums": known["sums"] | sums}
            report.write("glm_slice", {**report.gpu(), "note": note, **known})
        for (model, context), goal in GOALS.items():
            found = known["sums"].get(sum_name(model, context, "auto"), {}).get("sync_over_full")
            if model == name and found is not None:
                print(f"{model}_{context}_over_full={found:.2f} goal={goal}")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
