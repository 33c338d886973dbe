"""select, locate and append on a GPU: launches in one graph over several layers' memory, beside their floors.

    python -m benchmarks.select

`select` reads every block's bounds; its floor is those bytes over 4.26 TB/s, a large copy's rate on an H200.
`locate` and `append` move next to nothing; a launch is their floor. `heart` is the three in a row, as a step
of `kv_mode=full` has them. Launches overlap, as they do in a step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.gpu_timing import GIB, seconds_of
from services.decoder.kernels.gpu.append import AppendCall, AppendShape
from services.decoder.kernels.gpu.host_memory import RegisteredMemory
from services.decoder.kernels.gpu.locate import LocateCall, LocateShape
from services.decoder.kernels.gpu.select import SelectCall, SelectShape

BYTES_A_SECOND = 4.26e12
BLOCK_TOKENS = 16
BLOCKS_PER_PAGE = 4
TOP_K = 128


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    model: str
    head_dim: int
    kv_heads: int
    groups: int
    group_size: int
    batch: int
    context: int

    @property
    def pages(self) -> int:
        """Of one row."""
        return -(-self.context // (BLOCK_TOKENS * BLOCKS_PER_PAGE))

    @property
    def bounds_bytes(self) -> int:
        """Of all rows in one layer, as select reads them."""
        blocks = (self.context - 1) // BLOCK_TOKENS
        return self.batch * blocks * self.kv_heads * 2 * self.head_dim * 2 if blocks >= TOP_K else 0


def cases() -> list[Case]:
    """The table's lines."""
    qwen = ("qwen3-8b", 128, 8)
    lines = [Case(*qwen, 8, 4, batch, 8192) for batch in (1, 8, 32, 64)]
    lines += [Case(*qwen, 8, 4, batch, 32768) for batch in (1, 8, 32)]
    lines += [Case(*qwen, 8, 4, batch, 131072) for batch in (1, 8)]
    lines += [Case(*qwen, 8, 4, 32, 2048)]
    lines += [Case(*qwen, 1, 4, batch, 8192) for batch in (1, 8, 32)]
    lines += [Case("smollm2-135m", 64, 3, 3, 3, batch, 8192) for batch in (1, 8, 32)]
    return lines


class Rig:
    """Calls of several layers, which share the tables and nothing else."""

    def __init__(self, case: Case, arena_pointer: int, arena_bytes: int) -> None:
        rows, lanes = case.batch, case.batch * case.groups
        pages = rows * case.pages
        page_bounds = BLOCKS_PER_PAGE * case.kv_heads * 2 * case.head_dim
        self.layers = max(3, min(64, 512 * 2**20 // (pages * page_bounds * 2)))
        table = torch.randperm(pages, device="cuda").int().view(rows, case.pages)
        block_bytes = BLOCK_TOKENS * 2 * case.kv_heads // case.groups * case.head_dim * 2
        host_pages = arena_bytes // (case.groups * BLOCKS_PER_PAGE * block_bytes)
        common = {
            "seats": torch.randperm(rows, device="cuda").int(),
            "length": torch.full((rows,), case.context, dtype=torch.int32, device="cuda"),
            "real_rows": torch.tensor([rows], dtype=torch.int32, device="cuda"),
            "device_pages": table,
        }
        self.select_shape = SelectShape(
            case.head_dim,
            case.kv_heads,
            case.groups,
            case.group_size,
            BLOCK_TOKENS,
            BLOCKS_PER_PAGE,
            TOP_K,
            torch.bfloat16,
        )
        self.locate_shape = LocateShape(TOP_K, case.groups, BLOCK_TOKENS, BLOCKS_PER_PAGE)
        self.append_shape = AppendShape(
            case.head_dim, case.kv_heads, case.groups, BLOCK_TOKENS, BLOCKS_PER_PAGE, torch.bfloat16
        )
        query_heads = case.kv_heads * case.group_size
        qkv = torch.randn(rows, query_heads + 2 * case.kv_heads, case.head_dim, device="cuda").bfloat16()
        query, key, value = qkv.tensor_split((query_heads, query_heads + case.kv_heads), dim=1)

        def index(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.int32, device="cuda")

        selected, slots = index(lanes, TOP_K), index(lanes, TOP_K)
        keys, arrived = index(SelectCall.workspace(self.select_shape, rows, case.pages)), index(lanes)
        self.select, self.locate, self.append = [], [], []
        for _ in range(self.layers):
            bounds = torch.randn(pages, BLOCKS_PER_PAGE, case.kv_heads, 2 * case.head_dim, device="cuda")
            bounds = bounds.bfloat16()
            self.select.append(
                SelectCall(
                    query=query, bounds=bounds, selected=selected, keys=keys, arrived=arrived, **common
                )
            )
            self.locate.append(
                LocateCall(
                    selected=selected,
                    slots=slots,
                    open_slot=index(lanes),
                    counters=torch.zeros(6, dtype=torch.int64, device="cuda"),
                    **common,
                )
            )
            self.append.append(
                AppendCall(
                    key=key,
                    value=value,
                    open_slot=torch.arange(lanes, dtype=torch.int32, device="cuda"),  # the pool is small here
                    host_pages=table % host_pages,
                    pool=torch.zeros(lanes, block_bytes // 2, dtype=torch.bfloat16, device="cuda"),
                    arena_pointer=arena_pointer,
                    bounds=bounds,
                    arena_bounds_pointer=arena_pointer,
                    **common,
                )
            )
        self.select[0].check(self.select_shape)
        self.locate[0].check(self.locate_shape)
        self.append[0].check(self.append_shape)

    def us(self, *names: str) -> float:
        """Microseconds a layer of these operations, in this order."""

        def layer(number: int) -> None:
            if "select" in names:
                self.select[number].launch(self.select_shape)
            if "locate" in names:
                self.locate[number].launch(self.locate_shape)
            if "append" in names:
                self.append[number].launch(self.append_shape)

        return graph_us(layer, self.layers)


def graph_us(launch: Callable[[int], None], layers: int) -> float:
    """Median microseconds a layer of a graph of all of them."""
    launch(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            launch(layer)
    return seconds_of(graph.replay, lambda: None, 7) / layers * 1e6


def main() -> None:
    """Measure, print, write JSON."""
    memory = mmap.mmap(-1, GIB)
    registered = RegisteredMemory(torch.frombuffer(memory, dtype=torch.int32).data_ptr(), GIB)
    rows: list[dict[str, Any]] = []
    print("model        groups batch context   select    floor   locate   append    heart   (us)")
    for case in cases():
        rig = Rig(case, registered.device_address, GIB)
        figures = {name: rig.us(name) for name in ("select", "locate", "append")}
        figures["heart"] = rig.us("select", "locate", "append")
        del rig
        torch.cuda.empty_cache()
        floor = case.bounds_bytes / BYTES_A_SECOND * 1e6
        print(
            f"{case.model:<13}{case.groups:>6}{case.batch:>6}{case.context:>8}{figures['select']:>9.2f}{floor:>9.2f}"
            f"{figures['locate']:>9.2f}{figures['append']:>9.2f}{figures['heart']:>9.2f}",
            flush=True,
        )
        rows.append(
            {
                "model": case.model,
                "groups": case.groups,
                "batch": case.batch,
                "context": case.context,
                "select_floor_us": round(floor, 2),
                **{f"{name}_us": round(us, 2) for name, us in figures.items()},
            }
        )
    torch.cuda.synchronize()
    registered.close()
    report.write("select", report.gpu() | {"rows": rows})


if __name__ == "__main__":
    main()
