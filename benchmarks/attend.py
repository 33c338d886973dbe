"""Decode attention on a GPU: launches in one graph over several layers' memory, beside their floor.

    python -m benchmarks.attend

`gqa` is Qwen3-8B's layer (8 KV heads of 128, 4 query heads each, 128 blocks of 16 tokens a KV head), `mla` is
DeepSeek-V3.2's (2,048 records of 512 + 64, as many heads as the line says). The floor is the chosen bytes
over 4.26 TB/s, a large copy's rate on an H200. For `mla` at many heads the products are more than the bytes;
the TFLOP/s stand beside. Launches overlap, as they do in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.gpu_timing import seconds_of
from services.decoder.kernels.gpu.attend import AttendCall, AttendShape
from services.decoder.kernels.gpu.attend_latent import AttendLatentCall, AttendLatentShape

BYTES_A_SECOND = 4.26e12
LAYERS_BYTES = 400 * 2**20  # several times the L2
DTYPE = torch.bfloat16
REPLAYS = 9


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    heads: int  # query heads of a row
    batch: int
    record: tuple[int, ...]  # shape of what a slot holds
    top_k: int
    lanes_a_row: int
    products: int  # multiply-adds of one token and query head

    @property
    def lanes(self) -> int:
        return self.batch * self.lanes_a_row

    @property
    def bytes(self) -> int:
        """Chosen by all rows in one layer."""
        return self.lanes * self.top_k * torch.Size(self.record).numel() * DTYPE.itemsize

    @property
    def layers(self) -> int:
        return max(3, LAYERS_BYTES // self.bytes)


def cases() -> list[Case]:
    """The table's lines."""
    lines = [Case("gqa", 32, batch, (16, 2, 1, 128), 128, 8, 256) for batch in (1, 2, 4, 8, 16, 32, 64)]
    for heads in (16, 128):
        lines += [Case("mla", heads, batch, (1, 576), 2048, 1, 576 + 512) for batch in (1, 8, 32)]
    return lines


class Rig:
    """Layers' pools and choices, and one launch for each."""

    def __init__(self, case: Case) -> None:
        lanes, k = case.lanes, case.top_k
        self.case = case
        block_tokens = case.record[0]
        self.selected = torch.rand(lanes, k, device="cuda").argsort(1).int()
        self.length = torch.full((case.batch,), k * block_tokens, dtype=torch.int32, device="cuda")
        self.real = torch.full((1,), case.batch, dtype=torch.int32, device="cuda")
        self.launches = [
            self._latent() if case.name == "mla" else self._grouped() for _ in range(case.layers)
        ]

    def _pool(self) -> tuple[Tensor, Tensor]:
        slots = self.case.lanes * self.case.top_k
        pool = torch.randn(slots, *self.case.record, device="cuda", dtype=DTYPE)
        return pool, torch.randperm(slots, device="cuda").int().view(self.case.lanes, -1)

    def _grouped(self) -> Callable[[], None]:
        case = self.case
        block_tokens, _, heads, head_dim = case.record
        units = case.lanes * heads
        group_size = case.heads // (case.lanes_a_row * heads)
        shape = AttendShape.fitting(head_dim, group_size, block_tokens, DTYPE, units)  # as the engine does
        splits = shape.splits(case.top_k)
        query = torch.randn(case.batch, case.heads, head_dim, device="cuda", dtype=DTYPE)
        pool, slots = self._pool()
        call = AttendCall(
            query=query,
            pool=pool,
            slots=slots,
            selected=self.selected,
            length=self.length,
            real_rows=self.real,
            out=torch.empty_like(query),
            partial=torch.empty(AttendCall.workspace(shape, units, splits), device="cuda"),
            arrived=torch.zeros(units, dtype=torch.int32, device="cuda"),
            groups=case.lanes_a_row,
            scaling=head_dim**-0.5,
            splits=splits,
        )
        call.check(shape)
        return lambda: call.launch(shape)

    def _latent(self) -> Callable[[], None]:
        case = self.case
        shape = AttendLatentShape.fitting(512, 64, case.heads, 1, DTYPE, cluster=8)
        splits = shape.splits(case.top_k)
        sizes = (shape, case.batch, case.heads)
        pool, slots = self._pool()
        call = AttendLatentCall(
            query=torch.randn(case.batch, case.heads, 576, device="cuda", dtype=DTYPE),
            pool=pool,
            slots=slots,
            selected=self.selected,
            length=self.length,
            real_rows=self.real,
            out=torch.empty(case.batch, case.heads, 512, device="cuda", dtype=DTYPE),
            partial=torch.empty(AttendLatentCall.workspace(*sizes, splits), device="cuda"),
            arrived=torch.zeros(AttendLatentCall.arrivals(*sizes), dtype=torch.int32, device="cuda"),
            scaling=192**-0.5,
            splits=splits,
        )
        call.check(shape)
        return lambda: call.launch(shape)

    def microseconds(self) -> float:
        """A launch, median over replays of one graph."""
        self.launches[0]()
        rounds = max(1, 24 // len(self.launches))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in self.launches * rounds:
                launch()
        return seconds_of(graph.replay, lambda: None, REPLAYS) / (rounds * len(self.launches)) * 1e6


def main() -> None:
    """Measure, print, write JSON."""
    print("case  heads batch  floor us        us  share  TFLOP/s")
    rows: list[dict[str, Any]] = []
    for case in cases():
        us = Rig(case).microseconds()
        torch.cuda.empty_cache()
        floor = case.bytes / BYTES_A_SECOND * 1e6
        tokens = case.batch * case.heads * case.top_k * case.record[0]
        tflops = 2 * tokens * case.products / us / 1e6
        rows.append(
            {
                "case": case.name,
                "heads": case.heads,
                "batch": case.batch,
                "us": round(us, 2),
                "floor_us": round(floor, 2),
                "tflop_s": round(tflops, 1),
            }
        )
        line = f"{case.name:<6}{case.heads:>5}{case.batch:>6}{floor:>10.2f}{us:>10.2f}"
        print(f"{line}{floor / us:>7.2f}{tflops:>9.1f}", flush=True)
    report.write("attend", report.gpu() | {"rows": rows})


if __name__ == "__main__":
    main()
