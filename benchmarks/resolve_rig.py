"""Layers of resolve calls with exact miss counts: tables, selections, one graph, and the proof of every byte.

Every step's selection is k - m blocks of the step before, which are surely resident, and m blocks never
seen, so exactly m miss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_timing import GIB, Arena, seconds_of
from services.decoder.kernels.gpu.resolve import ResolveCall, ResolveShape
from services.decoder.kernels.lanes import empty_tables, layer_of, seat
from services.decoder.kernels.lru import LaneTables
from services.decoder.kv.hot_class import parcel_slots_for

LAYERS = 4
REPLAYS = 7


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


class Rig:
    """Layers with tables, and two steps' selections: one that fills, and those that are timed."""

    def __init__(self, case: Case, arena: Arena, steps: int, shape: ResolveShape | None = None) -> None:
        self.case, self.arena, self.steps = case, arena, steps
        lanes, k, capacity = case.lanes, case.top_k, case.capacity
        fresh = case.misses * steps
        # The open block is far off, so no lane is fully resident, but for the cases that say so.
        self.max_blocks = k + fresh + (1 if case.resident else 100_000)
        size = parcel_slots_for(capacity)
        most = capacity // size
        self.shape = shape or ResolveShape.fitting(case.block_bytes, k, most, size, lanes)
        extent_blocks = case.extent_gib * GIB // case.block_bytes // case.groups
        self.layers: list[list[ResolveCall]] = []
        rows, device = case.batch, torch.device("cuda")
        generator = torch.Generator(device=device).manual_seed(7)
        length = torch.full((rows,), self.max_blocks, dtype=torch.int32, device=device)
        seats = torch.arange(rows, dtype=torch.int32, device=device)
        real = torch.full((1,), rows, dtype=torch.int32, device=device)
        for layer in range(LAYERS):
            pages = torch.randint(
                extent_blocks, (rows, self.max_blocks), dtype=torch.int32, device=device, generator=generator
            )
            tables = self._tables(most, size, device)
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
                        length=length,
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
                        block_tokens=1,
                    )
                )
            self.layers.append(calls)
        for calls in self.layers:
            calls[0].check(self.shape)
            calls[0].launch(self.shape)  # fills
        torch.cuda.synchronize()
        self.before = [self._snapshot(calls[0].tables) for calls in self.layers]

    def _tables(self, most: int, size: int, device: torch.device) -> LaneTables:
        rows, groups = self.case.batch, self.case.groups
        tables = empty_tables(1, rows, groups, self.max_blocks, rows * most, size, most, device)
        tables.parcels.copy_(torch.arange(rows * most, device=device).view(rows, most))
        for row in range(rows):
            seat(tables, row, most * size, self.max_blocks - 1)
        return layer_of(tables, 0)

    @staticmethod
    def _snapshot(tables: LaneTables) -> list[Tensor]:
        return [t.clone() for t in (tables.block_to_slot, tables.slot_to_block, tables.order)]

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
            now = (tables.block_to_slot, tables.slot_to_block, tables.order)
            for tensor, old in zip(now, saved, strict=True):
                tensor.copy_(old)
            calls[0].counters.zero_()

    def measure(self, shape: ResolveShape | None = None) -> float:
        """Microseconds a launch, median over replays of one graph; checked byte for byte."""
        shape = shape or self.shape
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in range(1, self.steps + 1):
                for calls in self.layers:
                    calls[step].launch(shape)
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
