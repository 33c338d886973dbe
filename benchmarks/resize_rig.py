"""Resizes on a GPU: what it takes when rows own more or fewer hot slots from one step to the next.

Knows the hot buffer; no model computes. `elastic.py` prints and keeps the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.decode_rig import BLOCK_TOKENS
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.hot_class import HotClass, Resize
from services.decoder.kv.shape import KvShape
from services.decoder.models.causal_lm import CausalLM

ROWS, PARCELS = 64, 32


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
