"""resolve.cu against its twin: slots, tables, order, counters and bytes, over random histories."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass

import pytest
import torch

from services.decoder.kernels.gpu.host_memory import RegisteredMemory
from services.decoder.kernels.gpu.resolve import ResolveCall, ResolveShape
from services.decoder.kernels.lanes import capacity_of, clear, empty_tables, grow, shrink
from services.decoder.kernels.lru import LaneTables
from services.decoder.kernels.resolve import Counter, ResolveParams, resolve

pytestmark = pytest.mark.gpu


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


CASES = [
    Case(1152, 64, 1, 3, 48, 64, 400, 1, 300),
    Case(1152, 64, 1, 3, 48, 64, 400, 8, 300),
    Case(656, 64, 1, 5, 33, 34, 300, 2, 300),
    Case(256, 4, 3, 7, 16, 17, 120, 4, 300),
    Case(512, 4, 8, 4, 128, 256, 700, 1, 150),
    Case(4096, 1, 3, 2, 20, 40, 90, 8, 200),
    Case(8192, 4, 8, 2, 24, 48, 100, 2, 150),
    Case(65536, 1, 1, 2, 6, 9, 40, 4, 150),
    Case(1152, 64, 1, 2, 2048, 4096, 9000, 8, 40),
    Case(1152, 64, 1, 2, 2048, 2049, 9000, 1, 40),
    Case(1152, 64, 1, 1, 2048, 8192, 20000, 8, 40),
    Case(16, 64, 1, 200, 8, 12, 60, 1, 100),
    Case(16, 64, 3, 40, 600, 700, 1500, 2, 40),
]


def to_gpu(tables: LaneTables) -> LaneTables:
    return LaneTables(
        tables.block_to_slot.cuda(),
        tables.slot_to_block.cuda(),
        tables.order.cuda(),
        tables.resident.cuda(),
        tables.pool_slot.cuda(),
    )


class Rig:
    """The same lanes twice: the twin's on the CPU, the kernel's on the GPU."""

    def __init__(self, case: Case, padding: int) -> None:
        self.case = case
        chance = self.chance = random.Random(str(case))
        lanes = case.rows * case.groups
        self.cpu = empty_tables(lanes, case.max_blocks, case.capacity, torch.device("cpu"))
        self.free = list(range(lanes * case.capacity))
        chance.shuffle(self.free)
        for lane in range(lanes):
            low = case.top_k + 1
            grow(self.cpu, lane, [self.free.pop() for _ in range(chance.randint(low, case.capacity))])
        self.gpu = to_gpu(self.cpu)
        pages = -(-case.max_blocks // case.blocks_per_page)
        host_pages = pages + 3  # shared between rows, as prefixes are
        blocks = host_pages * case.groups * case.blocks_per_page
        size = -(-blocks * case.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, size)
        self.arena = torch.frombuffer(self.memory, dtype=torch.int32)[: blocks * case.block_bytes // 4]
        self.arena.random_(generator=torch.Generator().manual_seed(1))
        self.arena = self.arena.view(blocks, case.block_bytes // 4)
        self.registered = RegisteredMemory(self.arena.data_ptr(), size)
        self.host_pages = torch.stack([torch.randperm(host_pages)[:pages] for _ in range(case.rows)]).int()
        self.cpu_pool = torch.zeros(lanes * case.capacity, case.block_bytes // 4, dtype=torch.int32)
        self.gpu_pool = self.cpu_pool.cuda()
        self.cpu_counters = torch.zeros(len(Counter), dtype=torch.int64)
        self.batch_rows = case.rows + padding
        batch_lanes = self.batch_rows * case.groups
        self.newest = [chance.randint(0, case.max_blocks // 2) for _ in range(case.rows)]

        def gpu(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device="cuda")

        self.call = ResolveCall(
            tables=self.gpu,
            selected=gpu(batch_lanes, case.top_k),
            open_block=gpu(self.batch_rows),
            seats=gpu(self.batch_rows),
            real_rows=gpu(1),
            host_pages=self.host_pages.cuda(),
            arena_pointer=self.registered.device_address,
            pool=self.gpu_pool,
            counters=torch.zeros(6, dtype=torch.int64, device="cuda"),
            slots=gpu(batch_lanes, case.top_k),
            open_slot=gpu(batch_lanes),
            groups=case.groups,
            blocks_per_page=case.blocks_per_page,
        )
        self.shape = ResolveShape(case.block_bytes, case.top_k, case.capacity, case.cluster)
        self.call.check(self.shape)

    def selection(self, row: int) -> list[int]:
        """Few or many misses, repetitions and gaps, from a window that moves."""
        newest, chance = self.newest[row], self.chance
        low = chance.choice([0, 0, max(0, newest - 2 * self.case.top_k)])
        picks = [chance.randint(low, newest) for _ in range(self.case.top_k)]
        for _ in range(chance.choice([0, 0, 1, self.case.top_k // 3])):
            picks[chance.randrange(len(picks))] = -1
        return picks

    def step(self) -> None:
        case, chance = self.case, self.chance
        rows = [row for row in range(case.rows) if chance.random() < 0.8] or [0]
        chance.shuffle(rows)
        for row in rows:
            self.newest[row] = min(case.max_blocks - 1, self.newest[row] + (chance.random() < 0.4))
        picks = [self.selection(row) for row in rows for _ in range(case.groups)]
        opened = [self.newest[row] for row in rows]
        call, real = self.call, len(rows) * case.groups
        call.slots.fill_(-7)
        call.open_slot.fill_(-7)
        call.selected[:real] = torch.tensor(picks, dtype=torch.int32)
        call.open_block[: len(rows)] = torch.tensor(opened, dtype=torch.int32)
        call.seats[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
        call.real_rows.fill_(len(rows))
        call.launch(self.shape)

        lanes = torch.tensor([row * case.groups + group for row in rows for group in range(case.groups)])
        pages = self.host_pages[rows].long()
        block = torch.arange(case.max_blocks)
        page = pages[:, block // case.blocks_per_page].unsqueeze(1)
        group = torch.arange(case.groups).view(1, -1, 1)
        home = (page * case.groups + group) * case.blocks_per_page + block % case.blocks_per_page
        params = ResolveParams(self.cpu, self.cpu_pool, self.arena, self.cpu_counters)
        lane_open = torch.tensor(opened).repeat_interleave(case.groups)
        selected = torch.tensor(picks, dtype=torch.int32)
        expected = resolve(params, lanes, selected, lane_open, home.flatten(0, 1))
        assert torch.equal(call.slots[:real].cpu(), expected.slots)
        assert torch.equal(call.open_slot[:real].cpu(), expected.open_slot)
        assert bool((call.slots[real:] == -1).all())
        assert bool((call.open_slot[real:] == -1).all())
        for name in ("block_to_slot", "slot_to_block", "order", "resident"):
            ours, theirs = getattr(self.gpu, name).cpu(), getattr(self.cpu, name)
            assert torch.equal(ours, theirs), f"{name} differs"

    def resize(self) -> None:
        """A lane grows, shrinks or is cleared, on both sides."""
        case, chance = self.case, self.chance
        lane = chance.randrange(case.rows * case.groups)
        wanted = chance.randint(case.top_k + 1, case.capacity)
        if chance.random() < 0.3:
            self.free += clear(self.cpu, lane)
        change = wanted - capacity_of(self.cpu, lane)
        if change > 0:
            grow(self.cpu, lane, [self.free.pop() for _ in range(change)])
        elif change < 0:
            self.free += shrink(self.cpu, lane, -change)
        for name in ("block_to_slot", "slot_to_block", "order", "resident", "pool_slot"):
            getattr(self.gpu, name).copy_(getattr(self.cpu, name))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_twin(case: Case) -> None:
    rig = Rig(case, padding=2)
    try:
        for step in range(case.steps):
            rig.step()
            if step % 7 == 3:
                rig.resize()
        assert torch.equal(rig.gpu_pool.cpu(), rig.cpu_pool)
        wanted = rig.cpu_counters[: Counter.NANOSECONDS].tolist()
        assert rig.call.counters[: Counter.NANOSECONDS].tolist() == wanted
        assert wanted[Counter.MISSES] > 0
    finally:
        torch.cuda.synchronize()
        rig.registered.close()
