"""Decode speed on a GPU: time per output token of full and tiered, against the floor of the bytes to be read.

    python -m benchmarks.decode [--model qwen3-8b] [--layers N] [--cases full:1:8192,tiered:8:8192,...]

The time is that of whole engine steps: schedule, stage, replay, sample, read the tokens back. The floor is
(weights + chosen KV + bounds) / (bytes read and written a second by a large device copy, measured in the same
run). Exposed fetch time is the difference to the same run with resolve's bytes left out (its bookkeeping
kept). Tiered follows a trace of 7% misses, what Quest was seen to miss at twice its budget.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import NamedTuple

import torch

from benchmarks import report
from benchmarks.decode_rig import BLOCK_TOKENS, engine_in_mid_answer
from benchmarks.gpu_timing import seconds_of
from benchmarks.synthetic import synthetic_model
from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.offline import OfflineEngine
from services.decoder.kernels.counter import Counter
from services.decoder.models.causal_lm import CausalLM

BUDGET = 2048
MISSES = 0.07
WARM_STEPS, STEPS = 8, 48
CASES = ",".join(
    [
        *(f"full:{batch}:8192" for batch in (1, 8, 32)),
        *(f"tiered:{batch}:8192" for batch in (1, 8, 32)),
        *(f"{mode}:{batch}:32768" for mode in ("full", "tiered") for batch in (1, 8)),
    ]
)


class Case(NamedTuple):
    """One line of the table."""

    mode: str
    batch: int
    context: int


def copy_gb_s() -> float:
    """Bytes read and written a second by a copy of 4 GiB on the device."""
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), lambda: None, 7)
    return 2 * source.numel() / seconds / 1e9


def floor_bytes(model: CausalLM, case: Case) -> int:
    """What a step must read: weights but for the embedding, chosen KV, bounds."""
    spec, size = model.spec, model.dtype.itemsize
    embedding = 0 if spec.config.tie_word_embeddings else spec.vocab_size * spec.config.hidden_size * size
    record = 2 * spec.kv_heads * spec.head_dim * size * spec.layers
    chosen = case.batch * min(BUDGET, case.context) * record
    bounds = case.batch * case.context // BLOCK_TOKENS * record
    return model.weight_bytes - embedding + chosen + bounds


def step_seconds(engine: OfflineEngine) -> float:
    """Median of whole steps, each launched while the one before it runs, as a server does."""
    taken = []
    for number in range(WARM_STEPS + STEPS):
        begun = time.perf_counter()
        engine.step()
        if number >= WARM_STEPS:
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def measured(model: CausalLM, case: Case, *, skip_io: bool = False) -> tuple[float, float]:
    """Seconds a step and the share of choices that missed."""
    engine = engine_in_mid_answer(
        model,
        batch=case.batch,
        context=case.context,
        budget=BUDGET,
        mode=case.mode,
        misses=MISSES,
        skip_io=skip_io,
    )
    for _ in range(2):
        engine.step()
    engine.counters().zero_()
    seconds = step_seconds(engine)
    totals = engine.counters().sum(0).tolist()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return seconds, totals[Counter.MISSES] / max(1, totals[Counter.CHOSEN])


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's own number")
    parser.add_argument("--cases", default=CASES, help="mode:batch:context, comma-separated")
    wanted = parser.parse_args()
    device = torch.device("cuda:0")
    _, model = synthetic_model(wanted.model, device, torch.bfloat16, wanted.layers, dense=dense_ops(device))
    copied = copy_gb_s()
    torch.cuda.empty_cache()
    print(f"copy_gb_s={copied:.0f} GB/s", flush=True)
    rows = []
    for text in wanted.cases.split(","):
        mode, batch, context = text.split(":")
        case = Case(mode, int(batch), int(context))
        seconds, missed = measured(model, case)
        exposed = seconds - measured(model, case, skip_io=True)[0] if mode == "tiered" else 0.0
        floor = floor_bytes(model, case) / copied / 1e9
        rows.append(
            {
                "model": wanted.model,
                "mode": mode,
                "batch": case.batch,
                "context": case.context,
                "tpot_ms": 1e3 * seconds,
                "floor_ms": 1e3 * floor,
                "over_floor": seconds / floor,
                "exposed_fetch_ms": 1e3 * exposed,
                "miss_rate": missed,
            }
        )
        print(
            f"{mode:<7} batch {case.batch:3d}  context {case.context:6d}  tpot {1e3 * seconds:7.3f} ms  "
            f"floor {1e3 * floor:6.3f} ms  {seconds / floor:5.2f}x  exposed {1e3 * exposed:6.3f} ms  "
            f"misses {100 * missed:4.1f} %",
            flush=True,
        )
    report.write("decode", {**report.gpu(), "copy_gb_s": copied, "rows": rows})


if __name__ == "__main__":
    main()
