"""What other eviction policies would have missed, on the synthetic stream and on recorded traces.

    python -m benchmarks.policies [--trace FILE ...] [--capacities 1024,2048] [--half-lives 4,8,16,32]

The synthetic stream stands beside the paper's table. A trace is a file of `--record-selections`; its lanes
are told apart by layer and context. Prints tables, writes results/policies.json and docs/images/policies.png
(the picture needs matplotlib, of the dev extra; `--no-plot` does without).
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import report
from benchmarks.eviction import POLICIES, Make, Stream, lrfu, misses
from benchmarks.selection_stream import Lane, recorded, synthetic
from services.decoder.attention.selection_file import read_header

PAPER: Mapping[tuple[str, int], float] = {
    ("lru", 2048): 30.0,
    ("lru", 4096): 13.4,
    ("fifo", 4096): 17.2,
    ("random", 4096): 16.1,
    ("belady", 4096): 8.2,
    ("lru", 8192): 6.7,
}
"""(policy, capacity) -> misses in percent: GLM-5.1, one prompt of 100,384 tokens, the first 1,000 steps, mean
over 78 layers (arXiv 2608.07009)."""

PLOT = Path(__file__).parent.parent / "docs" / "images" / "policies.png"


class Row(NamedTuple):
    """One figure; of all layers if `layer` is None."""

    trace: str
    context: int  # tokens before the first step
    layer: int | None
    capacity: int  # blocks
    policy: str
    miss_percent: float
    steps: int  # counted, of all lanes together


def policies(half_lives: Iterable[float]) -> dict[str, Make]:
    """By name, all that are replayed."""
    return {**POLICIES, **{f"lrfu {half_life:g}": lrfu(half_life) for half_life in half_lives}}


def percent(stream: Stream, make: Make, capacity: int, warm_up: int) -> tuple[int, int]:
    """Misses and choices behind the first `warm_up` steps."""
    missed = misses(stream, make, capacity)[warm_up:]
    return int(missed.sum()), int(stream.sizes[warm_up:].sum())


def of_synthetic(stream: Stream, capacities: Sequence[int], makes: Mapping[str, Make]) -> list[Row]:
    """Every policy at every capacity, the first fill counted as the paper does."""
    context = int(stream.opened[0])
    rows = []
    for capacity in capacities:
        for name, make in makes.items():
            missed, chosen = percent(stream, make, capacity, 0)
            rows.append(
                Row("synthetic", context, None, capacity, name, 100 * missed / chosen, len(stream.chosen))
            )
    return rows


def of_trace(
    name: str,
    lanes: Iterable[tuple[Lane, Stream]],
    capacities: Sequence[int],
    makes: Mapping[str, Make],
    warm_up: int,
) -> list[Row]:
    """Every policy at every capacity, by context and layer, and by context over all layers.

    Sequences of no more than `warm_up` steps are left out; two of one context count as one.
    """
    sums: dict[tuple[int, int | None, int, str], NDArray[np.int64]] = defaultdict(
        lambda: np.zeros(3, np.int64)
    )
    for lane, stream in lanes:
        steps = len(stream.chosen) - warm_up
        if steps <= 0:
            continue
        for capacity in capacities:
            for policy, make in makes.items():
                counted = (*percent(stream, make, capacity, warm_up), steps)
                for layer in (lane.layer, None):
                    sums[lane.first, layer, capacity, policy] += counted
    return [
        Row(name, *key, 100 * int(missed) / int(chosen), int(steps))
        for key, (missed, chosen, steps) in sums.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Policies down, capacities across, of one trace and context; the rows of all layers."""
    capacities = sorted({row.capacity for row in rows})
    found = {(row.policy, row.capacity): row.miss_percent for row in rows}
    lines = [f"{'misses, %':12}" + "".join(f"{capacity:>10,}" for capacity in capacities)]
    for policy in dict.fromkeys(row.policy for row in rows):
        cells = (found.get((policy, capacity)) for capacity in capacities)
        lines.append(
            f"{policy:12}" + "".join(f"{'' if cell is None else f'{cell:.2f}':>10}" for cell in cells)
        )
    return "\n".join(lines)


def beside_paper(rows: Sequence[Row]) -> str:
    """The paper's figures, ours, and how far they are apart."""
    found = {(row.policy, row.capacity): row.miss_percent for row in rows}
    lines = [f"{'policy':8}{'capacity':>10}{'paper':>8}{'ours':>8}{'apart':>8}"]
    for (policy, capacity), theirs in PAPER.items():
        ours = found.get((policy, capacity))
        if ours is not None:
            lines.append(f"{policy:8}{capacity:>10,}{theirs:>8.1f}{ours:>8.1f}{ours - theirs:>+8.1f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, nargs="*", default=[], help="files of --record-selections")
    parser.add_argument("--capacities", type=_numbers, default=[1024, 2048], help="of traces, blocks")
    parser.add_argument("--half-lives", type=_numbers, default=[4, 8, 16, 32], help="of LRFU, steps")
    parser.add_argument("--warm-up", type=int, default=50, help="first steps of a sequence that do not count")
    parser.add_argument("--no-synthetic", action="store_true", help="traces only")
    parser.add_argument("--no-plot", action="store_true", help="no picture")
    parser.add_argument("--result", default="policies", help="name of the JSON file in results/")
    asked = parser.parse_args(arguments)
    makes = policies(asked.half_lives)
    began, rows = time.monotonic(), list[Row]()
    if not asked.no_synthetic:
        stream = synthetic()
        rows += of_synthetic(stream, sorted({capacity for _, capacity in PAPER}), makes)
        print(f"synthetic\n{table(rows)}\n\n{beside_paper(rows)}\n")
    for path in asked.trace:
        lanes = recorded(path, read_header(path).block_tokens)
        found = of_trace(path.stem, lanes, asked.capacities, makes, asked.warm_up)
        rows += found
        for context in sorted({row.context for row in found}):
            own = [row for row in found if row.context == context and row.layer is None]
            print(f"{path.stem}, {context:,} tokens\n{table(own)}\n")
    written = report.write(
        asked.result,
        {
            "seconds": round(time.monotonic() - began, 1),
            "warm_up_steps": asked.warm_up,
            "rows": [row._replace(miss_percent=round(row.miss_percent, 3))._asdict() for row in rows],
        },
    )
    print(f"result={written}")
    if not asked.no_plot:
        from benchmarks.policies_plot import draw  # needs matplotlib

        draw(rows, PAPER, PLOT)
        print(f"plot={PLOT}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
