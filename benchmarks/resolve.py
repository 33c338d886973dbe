"""resolve on a GPU, against the link: launches at exact miss counts, beside a plain gather of the records.

    python -m benchmarks.resolve [--quick]

Every step's selection is k - m blocks of the step before, which are surely resident, and m blocks never
seen, so exactly m miss. A CUDA graph holds several layers, each with tables and pool of its own and a
stretch of the arena of `extent`; tables are put back to the same state before every replay. After the last
replay every hot slot is compared with the arena, byte for byte.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from services.decoder.kernels.gpu.host_memory import RegisteredMemory
from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.gpu.resolve import ResolveCall, ResolveShape
from services.decoder.kernels.lru import LaneTables

LAYERS = 4
REPLAYS = 7
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str  # dsa: one lane a row, 1-token blocks; quest: 8 lanes a row, 16-token blocks
    block_bytes: int
    top_k: int
    groups: int
    capacity: int
    batch: int
    miss_rate: float
    extent_gib: int
    resident: bool = False  # every block of the row has a slot

    @property
    def lanes(self) -> int:
        return self.batch * self.groups

    @property
    def misses(self) -> int:
        """A lane and step."""
        return round(self.top_k * self.miss_rate)


class GatherParams(ctypes.Structure):
    """As gather.cu's struct."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("records", ctypes.c_int32),
    ]


class Arena:
    """A registered file on a tmpfs, filled with numbers that tell blocks apart."""

    def __init__(self, length: int) -> None:
        descriptor, path = tempfile.mkstemp(dir="/dev/shm")
        os.unlink(path)  # noqa: PTH108  # the mapping keeps the bytes
        os.ftruncate(descriptor, length)
        self.memory = mmap.mmap(descriptor, length)
        os.close(descriptor)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.words = torch.frombuffer(self.memory, dtype=torch.int32)
        step = 2**26
        for at in range(0, self.words.shape[0], step):
            end = min(at + step, self.words.shape[0])
            self.words[at:end] = torch.arange(at, end).int()  # wraps: a block's words still tell it apart
        self.registered = RegisteredMemory(self.words.data_ptr(), length)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def seconds_of(work: Callable[[], object], prepare: Callable[[], None], replays: int) -> float:
    """Median seconds between two events around `work`; `prepare` runs before each, untimed."""
    taken = []
    for _ in range(replays + 1):
        prepare()
        begin, end = _event(), _event()
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(taken[1:])


class Rig:
    """Layers with tables, and two steps' selections: one that fills, and those that are timed."""

    def __init__(self, case: Case, arena: Arena, steps: int, shape: ResolveShape | None = None) -> None:
        self.case, self.arena, self.steps = case, arena, steps
        lanes, k, capacity = case.lanes, case.top_k, case.capacity
        fresh = case.misses * steps
        # The open block is far off, so no lane is fully resident, but for the cases that say so.
        self.max_blocks = k + fresh + (1 if case.resident else 100_000)
        self.shape = shape or ResolveShape.fitting(case.block_bytes, k, capacity, lanes)
        extent_blocks = case.extent_gib * GIB // case.block_bytes // case.groups
        self.layers: list[list[ResolveCall]] = []
        rows, device = case.batch, torch.device("cuda")
        generator = torch.Generator(device=device).manual_seed(7)
        self.opened = torch.full((rows,), self.max_blocks - 1, dtype=torch.int32, device=device)
        seats = torch.arange(rows, dtype=torch.int32, device=device)
        real = torch.full((1,), rows, dtype=torch.int32, device=device)
        for layer in range(LAYERS):
            pages = torch.randint(
                extent_blocks, (rows, self.max_blocks), dtype=torch.int32, device=device, generator=generator
            )
            tables = self._tables(lanes, capacity, device)
            pool = torch.zeros(lanes * capacity, case.block_bytes // 4, dtype=torch.int32, device=device)
            stretch = arena.registered.device_address
            stretch += (
                layer * case.extent_gib * GIB % max(1, arena.words.shape[0] * 4 - case.extent_gib * GIB + 1)
            )
            stretch -= stretch % 16
            counters = torch.zeros(6, dtype=torch.int64, device=device)
            calls = []
            chosen = torch.stack(
                [torch.randperm(k, device=device, generator=generator) for _ in range(lanes)]
            )
            for step in range(steps + 1):
                if step:
                    order = torch.rand(lanes, k, device=device, generator=generator).argsort(1)
                    kept = chosen.gather(1, order[:, : k - case.misses])
                    first = k + case.misses * (step - 1)
                    new = torch.arange(first, first + case.misses, device=device).expand(lanes, -1)
                    mixed = torch.cat([kept, new], 1)
                    chosen = mixed.gather(
                        1, torch.rand(lanes, k, device=device, generator=generator).argsort(1)
                    )
                calls.append(
                    ResolveCall(
                        tables=tables,
                        selected=chosen.int().contiguous(),
                        open_block=self.opened,
                        seats=seats,
                        real_rows=real,
                        host_pages=pages,
                        arena_pointer=stretch,
                        pool=pool,
                        counters=counters,
                        slots=torch.empty(lanes, k, dtype=torch.int32, device=device),
                        open_slot=torch.empty(lanes, dtype=torch.int32, device=device),
                        groups=case.groups,
                        blocks_per_page=1,
                    )
                )
            self.layers.append(calls)
        for calls in self.layers:
            calls[0].check(self.shape)
            calls[0].launch(self.shape)  # fills
        torch.cuda.synchronize()
        self.before = [self._snapshot(calls[0].tables) for calls in self.layers]

    def _tables(self, lanes: int, capacity: int, device: torch.device) -> LaneTables:
        def full(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        slots = torch.arange(capacity, dtype=torch.int32, device=device).expand(lanes, -1).contiguous()
        base = torch.arange(lanes, dtype=torch.int32, device=device).unsqueeze(1) * capacity
        return LaneTables(
            block_to_slot=full(lanes, self.max_blocks),
            slot_to_block=full(lanes, capacity),
            order=slots.clone(),
            resident=torch.zeros(lanes, dtype=torch.int32, device=device),
            pool_slot=(slots + base).contiguous(),
        )

    @staticmethod
    def _snapshot(tables: LaneTables) -> list[Tensor]:
        return [
            t.clone() for t in (tables.block_to_slot, tables.slot_to_block, tables.order, tables.resident)
        ]

    def missing_homes(self, call: ResolveCall, step: int) -> Tensor:
        """Where the blocks that `step` misses lie in the layer's stretch: [lanes * misses] int32."""
        case = self.case
        first = case.top_k + case.misses * (step - 1)
        row = torch.arange(case.lanes, device="cuda") // case.groups
        group = torch.arange(case.lanes, device="cuda") % case.groups
        pages = call.host_pages[row, first : first + case.misses]
        return (pages * case.groups + group.unsqueeze(1)).flatten().int()

    def restore(self) -> None:
        """Tables and counters as after the filling step."""
        for calls, saved in zip(self.layers, self.before, strict=True):
            tables = calls[0].tables
            now = (tables.block_to_slot, tables.slot_to_block, tables.order, tables.resident)
            for tensor, old in zip(now, saved, strict=True):
                tensor.copy_(old)
            calls[0].counters.zero_()

    def measure(self) -> float:
        """Microseconds a launch, median over replays of one graph; checked byte for byte."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in range(1, self.steps + 1):
                for calls in self.layers:
                    calls[step].launch(self.shape)
        seconds = seconds_of(graph.replay, self.restore, REPLAYS)
        self.verify()
        return seconds / (self.steps * LAYERS) * 1e6

    def verify(self) -> None:
        """The counters say m misses, and every slot that the last step returned holds its block's bytes."""
        case = self.case
        for calls in self.layers:
            last = calls[-1]
            wanted = case.misses * case.lanes * self.steps
            counted = int(last.counters[2])
            assert counted == wanted, f"{counted} misses were counted, {wanted} were meant"
            row = torch.arange(case.lanes, device="cuda") // case.groups
            group = torch.arange(case.lanes, device="cuda") % case.groups
            page = last.host_pages[row].long().gather(1, last.selected.long())
            block = page * case.groups + group.unsqueeze(1)
            words = case.block_bytes // 4
            offset = (last.arena_pointer - self.arena.registered.device_address) // 4
            first = (offset + block * words).int()
            got = last.pool[last.slots.long()]
            expected = first.unsqueeze(2) + torch.arange(words, dtype=torch.int32, device="cuda")
            assert torch.equal(got, expected), "a hot slot holds other bytes than its block"


def gather_us(rig: Rig) -> float:
    """Microseconds a launch of a plain gather of the same records, launch for launch, at its best shape."""
    case = rig.case
    launches = []
    for step in range(1, rig.steps + 1):
        for calls in rig.layers:
            call = calls[step]
            source = rig.missing_homes(call, step)
            target = torch.randperm(case.lanes * case.capacity, device="cuda")[: source.shape[0]].int()
            launches.append((call, source, target))
    best = float("inf")
    for threads, depth in [(256, 2), (256, 4), (512, 2), (512, 4), (1024, 1), (1024, 4)]:
        kernel = gather_kernel(case.block_bytes, threads, depth)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call, source, target in launches:
                parameters = GatherParams(
                    source=source.data_ptr(),
                    destination=target.data_ptr(),
                    arena=call.arena_pointer,
                    pool=call.pool.data_ptr(),
                    records=source.shape[0],
                )
                kernel.launch(torch.cuda.get_device_properties().multi_processor_count, parameters)
        best = min(best, seconds_of(graph.replay, lambda: None, 5) / len(launches) * 1e6)
    return best


_kernels: dict[tuple[int, int, int], Kernel] = {}


def gather_kernel(block_bytes: int, threads: int, depth: int) -> Kernel:
    """Compiled once."""
    key = (block_bytes, threads, depth)
    if key not in _kernels:
        from pathlib import Path

        _kernels[key] = Kernel(
            "gather",
            {"BLOCK_BYTES": block_bytes, "THREADS": threads, "DEPTH": depth},
            threads=threads,
            cluster=1,
            shared_bytes=0,
            folder=Path(__file__).parent,
        )
    return _kernels[key]


def copy_engine_gb_s(arena: Arena) -> float:
    """What cudaMemcpyAsync reaches from the arena."""
    words = arena.words[: GIB // 4]
    target = torch.empty_like(words, device="cuda")
    return GIB / seconds_of(lambda: target.copy_(words, non_blocking=True), lambda: None, 5) / 1e9


def cases(quick: bool) -> list[Case]:
    """The table's lines."""
    batches = (1, 4, 16, 64) if quick else (1, 2, 4, 8, 16, 32, 64)
    rates = (0.0, 0.134) if quick else (0.0, 0.067, 0.134, 0.3)
    lines = [Case("dsa", 1152, 2048, 1, 4096, b, rate, 1) for rate in rates for b in batches]
    lines += [Case("dsa", 1152, 2048, 1, 4096, b, 0.134, 8) for b in batches]
    for capacity in (8192, 32768):
        lines += [Case("dsa", 1152, 2048, 1, capacity, b, r, 1) for r in (0.0, 0.134) for b in (1, 16, 64)]
    lines += [
        Case("quest", 8192, 128, 8, 256, b, 0.07, 1) for b in ((1, 8, 32) if quick else (1, 2, 4, 8, 16, 32))
    ]
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
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    report.write(
        "resolve",
        {
            "card": torch.cuda.get_device_name(),
            "driver": driver,
            "copy_engine_gb_s": round(roof, 2),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
