"""resolve on a GPU, against the link: launches at exact miss counts, beside a plain gather of the records.

    python -m benchmarks.resolve [--quick]

A CUDA graph holds several layers, each with tables and pool of its own and a
stretch of the arena of `extent`; tables are put back to the same state before every replay. After the last
replay every hot slot is compared with the arena, byte for byte.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks import report
from benchmarks.gather import gather_us
from benchmarks.gpu_timing import GIB, Arena, copy_engine_gb_s
from benchmarks.resolve_rig import Case, Rig

BATCHES = (1, 2, 4, 8, 16, 32, 64)


def dsa(capacity: int, batch: int, miss_rate: float, extent_gib: int, resident: bool = False) -> Case:
    """DeepSeek's sparse attention: one lane a row, one token a block."""
    return Case("dsa", 1152, 2048, 1, capacity, batch, miss_rate, extent_gib, resident)


def cases(quick: bool) -> list[Case]:
    """The table's lines."""
    batches = (1, 4, 16, 64) if quick else BATCHES
    rates = (0.0, 0.134) if quick else (0.0, 0.067, 0.134, 0.3)
    lines = [dsa(4096, b, rate, extent) for extent in (1, 8) for rate in rates for b in batches]
    some = (1, 16, 64)
    lines += [dsa(capacity, b, r, 1) for capacity in (8192, 32768) for r in (0.0, 0.134) for b in some]
    lines += [dsa(4096, b, 0.0, 1, resident=True) for b in some]
    lines += [Case("quest", 8192, 128, 8, 256, b, 0.07, 1) for b in (1, 2, 4, 8, 16, 32)]
    return lines


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer lines")
    wanted = parser.parse_args()
    arena = Arena(10 * GIB)
    roof = copy_engine_gb_s(arena)
    print(f"copy engine {roof:.1f} GB/s")
    print("case   extent capacity batch   miss       us   GB/s gather us  share")
    rows: list[dict[str, Any]] = []
    for case in cases(wanted.quick):
        rig = Rig(case, arena, steps=6)
        us = rig.measure()
        cluster = rig.shape.cluster
        moved = case.misses * case.lanes * case.block_bytes
        plain = gather_us(rig) if case.misses else 0.0
        del rig
        torch.cuda.empty_cache()
        rows.append(
            {
                "case": case.name,
                "extent_gib": case.extent_gib,
                "capacity": case.capacity,
                "batch": case.batch,
                "miss_rate": case.miss_rate,
                "us": round(us, 2),
                "gb_s": round(moved / us / 1e3, 2),
                "gather_gb_s": round(moved / plain / 1e3, 2) if plain else 0.0,
                "cluster": cluster,
                "resident": case.resident,
            }
        )
        share = plain / us if plain else 0.0
        print(
            f"{case.name:<6}{case.extent_gib:>7}{case.capacity:>9}{case.batch:>6}{case.miss_rate:>7.3f}{us:>9.2f}"
            f"{moved / us / 1e3:>7.1f}{plain:>10.2f}{share:>7.2f}",
            flush=True,
        )
    report.write(
        "resolve",
        report.gpu()
        | {
            "copy_engine_gb_s": round(roof, 2),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
