"""resolve.cu against its twin: slots, tables, order, counters, plan and bytes, over random histories.

Rows of different capacities stand side by side, and between steps they grow, shrink, leave and come again.
"""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.attend_half import split_of
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.gpu.host_memory import RegisteredMemory
from services.decoder.kernels.gpu.resolve import ResolveCall, ResolveShape
from services.decoder.kernels.lanes import layer_of
from services.decoder.kernels.replay import plan_of
from services.decoder.kernels.resolve import resolve
from services.decoder.kernels.step_kernels import LayerStore, MissPlan, Split
from tests.decoder.parcels import Parcels, follow

pytestmark = pytest.mark.gpu

TABLES = ("block_to_slot", "slot_to_block", "order", "parcels", "capacity")
OUTS = ("slots", "open_slot", "plan.count", "plan.source", "plan.target", "split.hits", "split.misses")
PADDING = 2
BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Case:
    block_bytes: int
    blocks_per_page: int
    groups: int
    rows: int
    top_k: int
    capacity: int
    max_blocks: int
    cluster: int
    steps: int
    sweep: bool = False
    parcel_slots: int = 1

    @property
    def most(self) -> int:
        """Parcels of a row at its widest."""
        assert self.capacity % self.parcel_slots == 0
        return self.capacity // self.parcel_slots

    @property
    def floor(self) -> int:
        """Parcels that a row needs."""
        return -(-(self.top_k + 1) // self.parcel_slots)


CASES = [
    Case(1152, 64, 1, 3, 48, 64, 400, 1, 400, parcel_slots=2),
    Case(1152, 64, 1, 3, 48, 64, 400, 8, 400, parcel_slots=4),
    Case(1152, 64, 1, 3, 300, 340, 1500, 1, 200, sweep=True),
    Case(1152, 64, 1, 3, 300, 340, 1500, 4, 200, sweep=True, parcel_slots=4),
    Case(656, 64, 1, 5, 33, 34, 300, 2, 400, parcel_slots=2),
    Case(256, 4, 3, 7, 16, 17, 120, 4, 400),
    Case(512, 4, 8, 4, 128, 256, 700, 1, 250, sweep=True, parcel_slots=8),
    Case(512, 1, 8, 25, 24, 40, 90, 8, 250, parcel_slots=8),
    Case(4096, 1, 3, 2, 20, 40, 90, 8, 300, parcel_slots=4),
    Case(8192, 4, 8, 2, 24, 48, 100, 2, 250, parcel_slots=2),
    Case(8192, 4, 8, 3, 128, 160, 400, 8, 150, parcel_slots=16),
    Case(65536, 1, 1, 2, 6, 9, 40, 4, 250),
    Case(1152, 64, 1, 2, 2048, 4096, 9000, 8, 80, parcel_slots=16),
    Case(1152, 64, 1, 2, 2048, 2049, 9000, 1, 60, sweep=True),
    Case(656, 64, 1, 2, 2048, 4096, 9000, 8, 60, parcel_slots=16),
    Case(1152, 64, 1, 1, 2048, 8192, 20000, 2, 60, sweep=True, parcel_slots=16),
    Case(512, 4, 8, 6, 128, 2048, 2100, 1, 200, sweep=True, parcel_slots=8),
    Case(512, 4, 8, 6, 128, 2048, 2100, 8, 200, parcel_slots=16),
    Case(16, 64, 1, 1, 64, 70_000, 80_000, 8, 40, parcel_slots=16),
    Case(16, 64, 1, 200, 8, 12, 60, 1, 250),
    Case(16, 64, 3, 40, 600, 700, 1500, 2, 60, sweep=True, parcel_slots=4),
    Case(16, 64, 8, 200, 16, 24, 40, 1, 100, parcel_slots=8),
]


class Step(NamedTuple):
    """Of the n lanes of a step."""

    selected: Tensor  # [n, top_k] int64
    opened: Tensor  # [n, 1] int64
    home: Tensor  # [n, blocks] int64, where each block lies in the arena


class Rig:
    """The same lanes twice, both on the GPU: the twin's and the kernel's."""

    def __init__(self, case: Case, disturbed: bool = True) -> None:
        self.case, self.disturbed = case, disturbed
        self.chance = random.Random(str(case))
        self.generator = torch.Generator(device="cuda").manual_seed(self.chance.randrange(2**31))
        lanes = case.rows * case.groups
        # Some rows begin empty, some around a full buffer, some anywhere.
        around = [0, case.capacity - 1, case.capacity, case.capacity + 1, case.max_blocks // 2]
        self.newest = [min(case.max_blocks - 1, self.chance.choice(around)) for _ in range(case.rows)]
        self.newest[-1] = case.max_blocks // 2  # of one it is sure that its blocks exceed its slots
        self.sides = [
            Parcels(
                case.rows,
                case.groups,
                case.max_blocks,
                case.most,
                case.parcel_slots,
                seed=5,
                device=torch.device("cuda"),
            )
            for _ in range(2)
        ]
        for row in range(case.rows):
            self.seat(row, self.chance.choice([case.most, self.chance.randint(case.floor, case.most)]))
        self.gpu = layer_of(self.sides[1].tables, 0)
        pages = -(-case.max_blocks // case.blocks_per_page)
        host_pages = pages + 3  # shared between rows, as prefixes are
        blocks = host_pages * case.groups * case.blocks_per_page
        size = -(-blocks * case.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, size)
        self.arena = torch.frombuffer(self.memory, dtype=torch.int32)[: blocks * case.block_bytes // 4]
        self.arena.random_(generator=torch.Generator().manual_seed(1))
        self.arena = self.arena.view(blocks, case.block_bytes // 4)
        self.registered = RegisteredMemory(self.arena.data_ptr(), size)
        self.host_pages = torch.stack([torch.randperm(host_pages)[:pages] for _ in range(case.rows)]).cuda()
        pool = self.gpu_tensor(lanes * case.capacity, case.block_bytes // 4)
        counters = torch.zeros(len(Counter), dtype=torch.int64, device="cuda")
        self.twin = LayerStore(layer_of(self.sides[0].tables, 0), pool, self.arena.cuda(), counters)
        batch_rows = case.rows + PADDING
        batch_lanes = batch_rows * case.groups
        self.differs = torch.zeros(len(TABLES) + len(OUTS), dtype=torch.bool, device="cuda")
        self.call = ResolveCall(
            tables=self.gpu,
            selected=self.gpu_tensor(batch_lanes, case.top_k),
            length=self.gpu_tensor(batch_rows),
            seats=self.gpu_tensor(batch_rows),
            real_rows=self.gpu_tensor(1),
            host_pages=self.host_pages.int(),
            arena_pointer=self.registered.device_address,
            pool=pool.clone(),
            counters=counters.clone(),
            slots=self.gpu_tensor(batch_lanes, case.top_k),
            open_slot=self.gpu_tensor(batch_lanes),
            groups=case.groups,
            blocks_per_page=case.blocks_per_page,
            block_tokens=BLOCK_TOKENS,
            waited_until=torch.zeros(1, dtype=torch.int64, device="cuda"),
            plan=MissPlan(
                self.gpu_tensor(batch_lanes, case.top_k),
                self.gpu_tensor(batch_lanes, case.top_k),
                self.gpu_tensor(batch_lanes),
            ),
            split=Split(self.gpu_tensor(batch_lanes, case.top_k), self.gpu_tensor(batch_lanes, case.top_k)),
        )
        self.shape = ResolveShape(
            case.block_bytes,
            case.top_k,
            case.most,
            case.parcel_slots,
            case.cluster,
            copy_threads=128,
            sweep=case.sweep,
        )
        self.call.check(self.shape)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.registered.close()

    @staticmethod
    def gpu_tensor(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device="cuda")

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device="cuda", generator=self.generator)

    def seat(self, row: int, parcels: int) -> None:
        """On both sides."""
        for side in self.sides:
            side.seat(row, parcels, self.newest[row])

    def selection(self, lanes: Tensor, opened: Tensor) -> Tensor:
        """Lane by lane: anything, only what is there, only what is missing, nothing; repetitions, holes.

        Args:
            lanes: [n].
            opened: [n] each lane's newest block.
        """
        case, n = self.case, lanes.shape[0]
        block = torch.arange(case.max_blocks, device="cuda")
        known = self.twin.tables.block_to_slot[lanes] >= 0
        kind = self.rand(n, 1)
        keys = self.rand(n, case.max_blocks)
        barred = block > opened.unsqueeze(1)
        barred |= (kind < 0.15) & ~known
        barred |= (kind > 0.85) & known
        barred |= (
            (kind > 0.2) & (kind < 0.5) & (block < opened.unsqueeze(1) - 2 * case.top_k)
        )  # a window that moves
        best = keys.masked_fill_(barred, -1).topk(min(case.top_k, case.max_blocks), dim=1)
        picks = torch.full((n, case.top_k), -1, device="cuda")
        picks[:, : best.indices.shape[1]] = best.indices.masked_fill(best.values < 0, -1)
        columns = torch.randint(case.top_k, picks.shape, device="cuda", generator=self.generator)
        picks = torch.where(self.rand(n, 1) < 0.3, picks.gather(1, columns), picks)  # repetitions
        holes = (self.rand(n, 1) < 0.3) & (self.rand(*picks.shape) < 0.4) | (self.rand(n, 1) < 0.04)
        return picks.masked_fill(holes, -1)

    def step(self) -> Step:
        case, chance = self.case, self.chance
        rows = [row for row in range(case.rows) if chance.random() < 0.8] or [0]
        chance.shuffle(rows)
        for row in rows:
            self.newest[row] = min(case.max_blocks - 1, self.newest[row] + (chance.random() < 0.6))
        seats = torch.tensor(rows, device="cuda")
        opened = torch.tensor([self.newest[row] for row in rows], device="cuda")
        lanes = (seats.unsqueeze(1) * case.groups + torch.arange(case.groups, device="cuda")).flatten()
        lane_open = opened.repeat_interleave(case.groups)
        picks = self.selection(lanes, lane_open)
        if self.disturbed and chance.random() < 0.1:  # another process writes to the arena between steps
            torch.cuda.synchronize()
            self.arena[chance.randrange(self.arena.shape[0])] ^= 0x5A5A
            assert self.twin.arena is not None
            self.twin.arena.copy_(self.arena)

        call, real = self.call, len(lanes)
        plan, split = call.plan, call.split
        assert plan is not None
        assert split is not None
        for out in (call.slots, call.open_slot, plan.source, plan.target, plan.count, *split):
            out.fill_(-7)
        call.selected[:real] = picks
        call.length[: len(rows)] = opened * BLOCK_TOKENS + len(rows) % BLOCK_TOKENS + 1
        call.seats[: len(rows)] = seats
        call.real_rows.fill_(len(rows))
        call.launch(self.shape)

        block = torch.arange(case.max_blocks, device="cuda")
        page = self.host_pages[seats][:, block // case.blocks_per_page].unsqueeze(1)
        group = torch.arange(case.groups, device="cuda").view(1, -1, 1)
        home = ((page * case.groups + group) * case.blocks_per_page + block % case.blocks_per_page).flatten(
            0, 1
        )
        expected = resolve(self.twin, lanes, picks.int(), lane_open, home)
        wanted, halves = plan_of(expected, home), split_of(expected, picks.int())
        planned = torch.arange(case.top_k, device="cuda") < wanted.count.unsqueeze(1)
        pairs: list[tuple[Tensor, Tensor | int]] = [
            *((getattr(self.gpu, name), getattr(self.twin.tables, name)) for name in TABLES),
            (call.slots, self.padded(expected.slots, -1)),
            (call.open_slot, self.padded(expected.open_slot, -1)),
            (plan.count, self.padded(wanted.count, 0)),
            (plan.source, self.padded(wanted.source.masked_fill(~planned, -7), -7)),
            (plan.target, self.padded(wanted.target.masked_fill(~planned, -7), -7)),
            (split.hits, self.padded(halves.hits, -1)),
            (split.misses, self.padded(halves.misses, -1)),
        ]
        self.differs |= torch.stack([(ours != theirs).any() for ours, theirs in pairs])
        return Step(picks, lane_open.unsqueeze(1), home)

    def padded(self, real: Tensor, value: int) -> Tensor:
        """As many rows as the batch has; those that are padding hold `value`."""
        lanes = self.call.slots.shape[0]
        return torch.cat([real, real.new_full((lanes - real.shape[0], *real.shape[1:]), value)])

    def agree(self) -> None:
        """No step since the last look has differed."""
        assert not [name for name, bad in zip((*TABLES, *OUTS), self.differs.tolist(), strict=True) if bad]

    def resize(self) -> None:
        """A row grows, shrinks or begins anew, on both sides."""
        case, chance = self.case, self.chance
        row = chance.randrange(case.rows)
        wanted = chance.randint(case.floor, case.most)
        change = wanted - len(self.sides[0].held[row])
        anew = chance.random() < 0.3
        for side, pool in zip(self.sides, (self.twin.pool, self.call.pool), strict=True):
            if anew:
                side.leave(row)
            elif change > 0:
                side.grow(row, change)
            elif change < 0:
                follow(pool, side.shrink(row, -change))
        if anew:
            self.seat(row, wanted)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_twin(case: Case) -> None:
    rig = Rig(case)
    try:
        for step in range(case.steps):
            rig.step()
            if step % 9 == 5:
                rig.resize()
            if step % 20 == 0:
                rig.agree()
        rig.agree()
        assert torch.equal(rig.call.pool, rig.twin.pool), "a hot slot holds other bytes"
        wanted = rig.twin.counters[: Counter.NANOSECONDS].tolist()
        assert rig.call.counters[: Counter.NANOSECONDS].tolist() == wanted
        assert wanted[Counter.MISSES] > 0
        assert wanted[Counter.EVICTIONS] > 0 or case.capacity > 1000
        assert int(rig.call.counters[Counter.NANOSECONDS]) > 0
    finally:
        rig.close()


def test_probe_moves_no_bytes_and_changes_nothing_else() -> None:
    rig = Rig(replace(CASES[0], steps=50))
    rig.shape = replace(rig.shape, skip_io=True)
    try:
        for _ in range(rig.case.steps):
            rig.step()
        rig.agree()
        assert not bool(rig.call.pool.any())
        assert bool(rig.twin.pool.any())
    finally:
        rig.close()


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def test_time_is_counted_once_however_many_lanes_wait() -> None:
    rig = Rig(Case(1152, 64, 1, 60, 400, 450, 1500, 1, 30))
    try:
        begin, end = (event() for _ in range(2))
        launched = 0.0
        for _ in range(rig.case.steps):
            rig.step()
        before = int(rig.call.counters[Counter.NANOSECONDS])
        for _ in range(5):  # everything missing: as many resolve launches as events
            rig.call.selected.random_(0, 1500, generator=rig.generator)
            begin.record()
            rig.call.launch(rig.shape)
            end.record()
            torch.cuda.synchronize()
            launched += begin.elapsed_time(end) * 1e6
        counted = int(rig.call.counters[Counter.NANOSECONDS]) - before
        assert 0.2 * launched < counted < 1.05 * launched
    finally:
        rig.close()


def test_a_wrong_call_is_refused_by_name() -> None:
    rig = Rig(CASES[0])
    try:
        with pytest.raises(ValueError, match="selected must be a contiguous int32"):
            replace(rig.call, selected=rig.call.selected.long()).check(rig.shape)
        with pytest.raises(ValueError, match="pool rows must be 656"):
            rig.call.check(replace(rig.shape, block_bytes=656))
        with pytest.raises(ValueError, match=r"selected and slots must be \[lanes, 47\]"):
            rig.call.check(replace(rig.shape, top_k=47))
        assert rig.call.plan is not None
        with pytest.raises(ValueError, match=r"plan\.count"):
            replace(rig.call, plan=replace(rig.call.plan, count=rig.call.plan.count[:1])).check(rig.shape)
        assert rig.call.split is not None
        with pytest.raises(ValueError, match="both halves of split"):
            replace(rig.call, split=rig.call.split._replace(hits=rig.call.split.hits[:1])).check(rig.shape)
        with pytest.raises(ValueError, match="a split needs a plan"):
            replace(rig.call, plan=None).check(rig.shape)
        with pytest.raises(ValueError, match="tables must have 33 parcels a row of 2 slots"):
            rig.call.check(replace(rig.shape, parcels=33))
        with pytest.raises(ValueError, match="tables must be of 3 groups"):
            replace(rig.call, groups=3).check(rig.shape)
    finally:
        rig.close()
