"""What elastic capacity costs on a GPU: rows with everything resident beside full residency, and resizes.

    python -m benchmarks.elastic [--model qwen3-8b] [--context 32768] [--batches 1,8]

Time per output token of whole engine steps, `tiered` with slots for all blocks of its rows, all of them
touched before the clock starts, beside `full`; both make the same choices. Then what the device does when
rows are
resized: 64 rows at once, and one row by one parcel, as it grows while it decodes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.decode_rig import BLOCK_TOKENS, engine_in_mid_answer, touching_steps
from benchmarks.synthetic import synthetic_model
from services.decoder.engine.assembly import dense_ops
from services.decoder.kernels.counter import Counter
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.hot_class import HotClass, Resize
from services.decoder.kv.shape import KvShape
from services.decoder.models.causal_lm import CausalLM

BUDGET = 2048
STEPS = 120
MOST_US_A_LAYER = 3.0  # over full at batch 1
MOST_SHARE = 0.02  # of full's TPOT from batch 8 on
ROWS, PARCELS = 64, 32


def tpot(model: CausalLM, mode: str, batch: int, context: int) -> tuple[float, int]:
    """Median seconds of a step once everything was touched, and the blocks that missed meanwhile."""
    engine = engine_in_mid_answer(model, batch=batch, context=context, budget=BUDGET, mode=mode, whole=True)
    for _ in range(touching_steps(context, BUDGET // BLOCK_TOKENS) + 8):
        engine.step()
    torch.cuda.synchronize()
    before, taken = engine.counters().sum(0), []
    for _ in range(STEPS):
        begun = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    missed = int((engine.counters().sum(0) - before)[Counter.MISSES])
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return statistics.median(taken), missed


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds until the host goes on, and until the device has done it; the host must not wait."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    begun = time.perf_counter()
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    launched = time.perf_counter() - begun
    torch.cuda.synchronize()
    return {"host_ms": 1e3 * launched, "device_ms": 1e3 * (time.perf_counter() - begun)}


def resizes(model: CausalLM) -> dict[str, dict[str, float]]:
    """Of rows that own 32 parcels of 8 blocks a lane, all of them full: by half, and by one parcel."""
    spec = model.spec
    shape = KvShape(spec.layers, spec.kv_heads, spec.head_dim, spec.kv_heads, BLOCK_TOKENS, 64, model.dtype)
    hot_class = HotClass(spec.layers, ROWS * PARCELS, 8, 17, PARCELS)
    device = torch.device("cuda:0")
    hot = HotBuffer(shape, ROWS, 2048, [hot_class], device)
    slots = PARCELS * 8
    for row in range(ROWS):
        hot.resize([Resize(0, row, list(range(row * PARCELS, (row + 1) * PARCELS)))])
        hot.seat(row, slots - 1)
    for tables in hot.tables:  # as if every block below had been chosen once
        places = tables.places(torch.arange(ROWS * shape.groups, device=device), slots)
        blocks = torch.arange(slots, device=device).roll(1)
        tables.slot_to_block[places] = blocks.int()
        tables.block_to_slot[:, blocks] = torch.arange(slots, device=device).int()

    def to(count: int, rows: int) -> Callable[[], None]:
        def work() -> None:
            hot.resize(
                [Resize(0, row, list(range(row * PARCELS, row * PARCELS + count))) for row in range(rows)]
            )

        return work

    for count in (PARCELS - 1, PARCELS):  # the kernels are loaded, the allocator knows the sizes
        to(count, ROWS)()
    found = {
        "one row shrinks by a parcel": timed(to(PARCELS - 1, 1)),
        "one row grows by a parcel": timed(to(PARCELS, 1)),
        "64 rows shrink by a parcel": timed(to(PARCELS - 1, ROWS)),
        "64 rows grow by a parcel": timed(to(PARCELS, ROWS)),
        "64 rows shrink by half": timed(to(PARCELS // 2, ROWS)),
        "64 rows grow to twice": timed(to(PARCELS, ROWS)),
    }
    hot.check_integrity()
    return found


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--batches", default="1,8")
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
        full, _ = tpot(model, "full", batch, wanted.context)
        tiered, missed = tpot(model, "tiered", batch, wanted.context)
        layer_us = 1e6 * (tiered - full) / model.spec.layers
        rows.append(
            {
                "model": wanted.model,
                "context": wanted.context,
                "batch": batch,
                "full_tpot_ms": 1e3 * full,
                "resident_tpot_ms": 1e3 * tiered,
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
