"""What elastic capacity costs on a GPU: rows with everything resident beside full residency, and resizes.

    python -m benchmarks.elastic [--model qwen3-8b] [--context 32768] [--batches 1,8] [--rounds 2]

Time per output token of whole engine steps, `tiered` with slots for all blocks of its rows, all of them
touched before the clock starts, beside `full`; both make the same choices. Steps follow each other as in the
server, the next one launched while one runs, so the host's launches are in no figure; the mean counts a row's
growth by a parcel too. Both modes take turns, since a card is not the same card a minute later. Then what the
device does when rows are resized: 64 rows at once, and one row by one parcel, as it grows while it decodes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch

from benchmarks import report
from benchmarks.decode_rig import BLOCK_TOKENS, engine_in_mid_answer, touching_steps
from benchmarks.resize_rig import resizes
from benchmarks.synthetic import synthetic_model
from services.decoder.engine.assembly import dense_ops
from services.decoder.kernels.counter import Counter
from services.decoder.models.causal_lm import CausalLM

BUDGET = 2048
STEPS = 120
MOST_US_A_LAYER = 3.0  # over full at batch 1
MOST_SHARE = 0.02  # of full's TPOT from batch 8 on


def tpot(model: CausalLM, mode: str, batch: int, context: int) -> tuple[float, int]:
    """Mean seconds of a step once everything was touched, and the blocks that missed meanwhile."""
    engine = engine_in_mid_answer(model, batch=batch, context=context, budget=BUDGET, mode=mode, whole=True)
    for _ in range(touching_steps(context, BUDGET // BLOCK_TOKENS) + 8):
        engine.step()
    torch.cuda.synchronize()
    before = engine.counters().sum(0)
    engine.step()  # leaves one under way, as every step does
    begun = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    taken = (time.perf_counter() - begun) / STEPS
    missed = int((engine.counters().sum(0) - before)[Counter.MISSES])
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return taken, missed


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=2, help="of both modes; the mean counts, all are kept")
    wanted = parser.parse_args()
    device = torch.device("cuda:0")
    _, model = synthetic_model(wanted.model, device, torch.bfloat16, dense=dense_ops(device))
    moved = resizes(model)
    gc.collect()
    torch.cuda.empty_cache()
    for name, found in moved.items():
        print(
            f"{name:<30} host {found['host_ms']:8.2f} ms  done after {found['device_ms']:8.2f} ms", flush=True
        )
    rows: list[dict[str, Any]] = []
    for batch in map(int, wanted.batches.split(",")):
        taken: dict[str, list[float]] = {"full": [], "tiered": []}
        missed = 0
        for _ in range(wanted.rounds):
            for mode, rounds in taken.items():
                seconds, misses = tpot(model, mode, batch, wanted.context)
                rounds.append(seconds)
                missed += misses
        full, tiered = (statistics.fmean(rounds) for rounds in taken.values())
        layer_us = 1e6 * (tiered - full) / model.spec.layers
        rows.append(
            {
                "model": wanted.model,
                "context": wanted.context,
                "batch": batch,
                "full_tpot_ms": 1e3 * full,
                "resident_tpot_ms": 1e3 * tiered,
                "rounds_ms": {mode: [1e3 * one for one in rounds] for mode, rounds in taken.items()},
                "us_a_layer": layer_us,
                "over_full": tiered / full - 1,
                "misses": missed,
                "holds": layer_us <= MOST_US_A_LAYER if batch < 8 else tiered / full - 1 <= MOST_SHARE,
            }
        )
        print(
            f"batch {batch:3d}  full {1e3 * full:7.3f} ms  everything resident {1e3 * tiered:7.3f} ms  "
            f"{layer_us:6.2f} us a layer  {100 * (tiered / full - 1):5.2f} %  misses {missed}",
            flush=True,
        )
    report.write("elastic", {**report.gpu(), "rows": rows, "resizes": moved})
    for row in rows:
        print(f"elastic_us_a_layer_batch_{row['batch']}={row['us_a_layer']:.2f} us")
        print(f"elastic_over_full_batch_{row['batch']}={100 * row['over_full']:.2f} %")


if __name__ == "__main__":
    main()
