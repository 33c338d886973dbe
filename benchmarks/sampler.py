"""Sampling on a GPU: microseconds a draw, by wishes, rows, vocabulary and dtype of the logits.

    python -m benchmarks.sampler [--quick]

A CUDA graph holds draws over different logits, together more than the L2 holds; beside it, the time to read
their bytes at the rate of a large copy. `host` is what the host does for one step: the inputs' copy, and an
uncaptured launch.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.gpu_timing import seconds_of
from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.sequence import Sampling, Sequence

QWEN3, LARGEST = 151_936, 262_144
COLD_BYTES = 200 * 2**20  # four times the L2
FEWEST_DRAWS = 12

GREEDY = Sampling()
NUCLEUS = Sampling(
    temperature=0.8,
    top_p=0.9,
    top_k=50,
    repetition_penalty=1.1,
    frequency_penalty=0.3,
    presence_penalty=0.2,
)
WISHES = {
    "greedy": GREEDY,
    "nucleus": NUCLEUS,  # temperature, top-p, top-k and all penalties
    "plain": Sampling(temperature=1.0),
    "top_p": Sampling(temperature=1.0, top_p=0.9),
    "top_k": Sampling(temperature=1.0, top_k=50),
    "min_p": Sampling(temperature=1.0, min_p=0.05),
    "penalised_greedy": Sampling(frequency_penalty=0.3),
}


class Case(NamedTuple):
    """One line of the table."""

    wish: str
    rows: int
    vocab: int
    dtype: torch.dtype


def cases(quick: bool) -> list[Case]:
    """The table's lines."""
    both = (torch.bfloat16, torch.float32)
    lines = [Case("greedy", rows, QWEN3, dtype) for dtype in both for rows in (1, 32)]
    lines += [Case("nucleus", rows, QWEN3, torch.float32) for rows in (1, 32)]
    lines += [Case(wish, 32, QWEN3, torch.float32) for wish in WISHES if wish not in ("greedy", "nucleus")]
    if quick:
        return lines
    lines += [Case("greedy", rows, QWEN3, torch.bfloat16) for rows in (8, 64, 256)]
    lines += [
        Case(wish, rows, QWEN3, torch.bfloat16)
        for wish in ("nucleus", "plain")
        for rows in (1, 8, 32, 64, 256)
    ]
    lines += [
        Case(wish, rows, LARGEST, torch.bfloat16)
        for wish in ("greedy", "nucleus", "plain")
        for rows in (1, 32)
    ]
    return lines


def logits_like(rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """A normal bulk and a few dozen likely tokens above it, as heads give them."""
    logits = torch.randn(rows, vocab, device="cuda") * 2.5
    likely = torch.randint(0, vocab, (rows, 40), device="cuda")
    return logits.scatter_add_(1, likely, 12 - 4 * torch.rand(rows, 40, device="cuda").log().neg()).to(dtype)


def measure(case: Case) -> tuple[float, float]:
    """Microseconds of a captured draw, and of the host in a step without a graph."""
    sampler = DeviceSampler(case.rows, case.vocab, torch.device("cuda"))
    sequences = [
        Sequence("r", i, list(range(100)), WISHES[case.wish], seed=i, max_tokens=2**30, row=i)
        for i in range(case.rows)
    ]
    for sequence in sequences:
        sampler.seat(sequence)
    one = case.rows * case.vocab * case.dtype.itemsize
    steps = [
        logits_like(case.rows, case.vocab, case.dtype)
        for _ in range(max(FEWEST_DRAWS, -(-COLD_BYTES // one)))
    ]
    greedy = sampler.prepare(sequences)
    sampler.draw(steps[0], greedy=greedy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for logits in steps:
            sampler.draw(logits, greedy=greedy)
    us = seconds_of(graph.replay, lambda: None, 9) / len(steps) * 1e6
    torch.cuda.synchronize()
    repeats = 50
    begun = time.perf_counter()
    for _ in range(repeats):
        sampler.draw(steps[0], greedy=sampler.prepare(sequences))
    host_us = (time.perf_counter() - begun) / repeats * 1e6
    torch.cuda.synchronize()
    return us, host_us


def copy_gb_s() -> float:
    """Bytes read and written a second by a copy of 2 GiB on the device."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), lambda: None, 7) / 1e9


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer lines, and no file")
    quick = parser.parse_args().quick
    roof = copy_gb_s()
    print(f"copy {roof:.0f} GB/s\nwish              rows    vocab dtype           us  bytes us  host us")
    rows = []
    for case in cases(quick):
        us, host_us = measure(case)
        floor = case.rows * case.vocab * case.dtype.itemsize / roof / 1e3
        dtype = str(case.dtype).removeprefix("torch.")
        print(
            f"{case.wish:<18}{case.rows:>4}{case.vocab:>9} {dtype:<9}{us:>9.2f}{floor:>10.2f}{host_us:>9.1f}",
            flush=True,
        )
        rows.append(
            {"wish": case.wish, "rows": case.rows, "vocab": case.vocab, "dtype": dtype}
            | {"us": round(us, 2), "bytes_us": round(floor, 2), "host_us": round(host_us, 1)}
        )
    if not quick:
        report.write("sampler", {**report.gpu(), "copy_gb_s": round(roof), "rows": rows})


if __name__ == "__main__":
    main()
