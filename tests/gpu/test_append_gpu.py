"""append.cu against its twin, byte for byte: pool, arena and bounds, at any place in a block."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import pytest
import torch

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.append import AppendCall, AppendShape
from services.decoder.kernels.gpu.host_memory import RegisteredMemory
from services.decoder.kernels.twins import Twins

pytestmark = pytest.mark.gpu

PAGES = 3  # of each row


@dataclass(frozen=True)
class Case:
    head_dim: int
    kv_heads: int
    groups: int
    block_tokens: int
    blocks_per_page: int
    rows: int
    dtype: torch.dtype
    bounds: bool = True
    fused: bool = True  # keys and values are views into one tensor, as a fused projection leaves them


CASES = [
    Case(128, 8, 8, 16, 4, 1, torch.bfloat16),
    Case(128, 8, 8, 16, 4, 65, torch.bfloat16),
    Case(128, 8, 1, 16, 4, 5, torch.bfloat16),
    Case(128, 8, 2, 64, 1, 3, torch.bfloat16, bounds=False),
    Case(64, 3, 3, 16, 4, 7, torch.float32),
    Case(64, 3, 1, 4, 16, 7, torch.float32, fused=False),
    Case(80, 2, 1, 16, 4, 2, torch.float16),
    Case(96, 4, 4, 1, 64, 4, torch.float16),
    Case(256, 16, 4, 16, 8, 2, torch.float32),
    Case(8, 1, 1, 2, 1, 9, torch.bfloat16, fused=False),
]


class Rig:
    """Pool, arena and bounds twice: the twin's on the CPU, the kernel's on the GPU."""

    def __init__(self, case: Case, padding: int) -> None:
        self.case = case
        self.chance = torch.Generator().manual_seed(11)
        self.shape = AppendShape(
            case.head_dim, case.kv_heads, case.groups, case.block_tokens, case.blocks_per_page, case.dtype
        )
        table_rows, pages = case.rows + 2, (case.rows + 2) * PAGES + 5
        self.host_pages = self.shuffled(pages)[: table_rows * PAGES].view(table_rows, PAGES).int()
        self.device_pages = self.shuffled(pages)[: table_rows * PAGES].view(table_rows, PAGES).int()
        self.block_elements = case.block_tokens * 2 * case.kv_heads // case.groups * case.head_dim
        host_blocks = pages * case.groups * case.blocks_per_page
        size = host_blocks * self.block_elements * case.dtype.itemsize
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, size)
        arena = torch.frombuffer(self.memory, dtype=case.dtype)[: host_blocks * self.block_elements]
        self.arena = arena.view(host_blocks, self.block_elements)
        self.arena.copy_(self.normal(*self.arena.shape))
        self.cpu_arena = self.arena.clone()
        self.registered = RegisteredMemory(self.arena.data_ptr(), size)
        self.cpu_pool = self.normal(case.rows * case.groups + 3, self.block_elements)
        self.pool = self.cpu_pool.cuda()
        width = 2 * case.head_dim
        self.cpu_bounds = self.normal(pages, case.blocks_per_page, case.kv_heads, width)
        self.bounds = self.cpu_bounds.cuda()
        # The arena's bounds: in CUDA's own pinned memory, whose address is the device's too.
        self.cpu_saved = self.normal(pages, case.blocks_per_page, case.kv_heads, width)
        self.saved = self.cpu_saved.clone().pin_memory()
        self.rows = case.rows + padding

    def shuffled(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self.chance)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.chance).to(self.case.dtype)

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows + padding, kv_heads, head_dim] each, on the CPU."""
        case, rows = self.case, self.rows
        heads = case.kv_heads + 2 if case.fused else case.kv_heads  # two query heads stand in front
        both = self.normal(2, rows, heads, case.head_dim)
        return both[0][:, heads - case.kv_heads :], both[1][:, heads - case.kv_heads :]

    def step(self, offsets: torch.Tensor) -> None:
        """One token a row; `offsets` [rows] are its places in the open block."""
        case, real = self.case, self.case.rows
        blocks = torch.randint(PAGES * case.blocks_per_page, (real,), generator=self.chance)
        seats = self.shuffled(real + 2)[:real].int()
        length = (blocks * case.block_tokens + offsets + 1).int()
        open_slot = self.shuffled(self.cpu_pool.shape[0])[: real * case.groups].int()
        key, value = self.keys_and_values()
        batch = DecodeBatch(
            seats=seats,
            length=length,
            real_rows=torch.tensor([real], dtype=torch.int32),
            host_pages=self.host_pages,
            device_pages=self.device_pages,
            groups=case.groups,
            block_tokens=case.block_tokens,
            blocks_per_page=case.blocks_per_page,
            most_blocks=PAGES * case.blocks_per_page,
        )
        bounds = BlockBounds(self.cpu_bounds, self.cpu_saved) if case.bounds else None
        Twins().append(batch, open_slot, key[:real], value[:real], self.cpu_pool, self.cpu_arena, bounds)

        def padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
            return torch.cat([tensor, torch.zeros(size - tensor.shape[0], dtype=torch.int32)]).cuda()

        heads = key.shape[1] + 2 if case.fused else key.shape[1]
        home = torch.zeros(self.rows, 2, heads, case.head_dim, dtype=case.dtype, device="cuda")
        home[:, 0, heads - key.shape[1] :], home[:, 1, heads - key.shape[1] :] = key.cuda(), value.cuda()
        call = AppendCall(
            key=home[:, 0, heads - key.shape[1] :],
            value=home[:, 1, heads - key.shape[1] :],
            open_slot=padded(open_slot, self.rows * case.groups),
            seats=padded(seats, self.rows),
            length=padded(length, self.rows),
            real_rows=batch.real_rows.cuda(),
            host_pages=self.host_pages.cuda(),
            device_pages=self.device_pages.cuda(),
            pool=self.pool,
            arena_pointer=self.registered.device_address,
            bounds=self.bounds if case.bounds else None,
            arena_bounds_pointer=self.saved.data_ptr() if case.bounds else 0,
        )
        call.check(self.shape)
        call.launch(self.shape)
        torch.cuda.synchronize()
        assert torch.equal(self.pool.cpu(), self.cpu_pool), "pool"
        assert torch.equal(self.arena, self.cpu_arena), "arena"
        assert torch.equal(self.bounds.cpu(), self.cpu_bounds), "bounds"
        assert torch.equal(self.saved, self.cpu_saved), "the arena's bounds"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_twin(case: Case) -> None:
    rig = Rig(case, padding=2)
    try:
        for fixed in (0, case.block_tokens - 1, None, None):
            drawn = torch.randint(case.block_tokens, (case.rows,), generator=rig.chance)
            rig.step(drawn if fixed is None else torch.full_like(drawn, fixed))
    finally:
        torch.cuda.synchronize()
        rig.registered.close()


def test_nan_stays_in_the_bounds() -> None:
    rig = Rig(Case(64, 2, 2, 16, 4, 1, torch.bfloat16), padding=0)
    try:
        rig.cpu_bounds.fill_(float("nan"))
        rig.bounds.fill_(float("nan"))
        with pytest.raises(AssertionError, match="bounds"):  # NaN is not equal to itself
            rig.step(torch.tensor([3]))
        assert int(rig.bounds.isnan().sum()) == int(rig.cpu_bounds.isnan().sum()) == rig.bounds.numel()
    finally:
        torch.cuda.synchronize()
        rig.registered.close()


def test_what_cannot_be_right_is_refused_by_name() -> None:
    rig = Rig(Case(64, 2, 2, 16, 4, 1, torch.bfloat16), padding=0)
    try:
        index = torch.zeros(1, dtype=torch.int32, device="cuda")
        key = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device="cuda")

        def call(**changed: torch.Tensor) -> AppendCall:
            fields = {
                "key": key,
                "value": key,
                "open_slot": index.repeat(2),
                "seats": index,
                "length": index,
                "real_rows": index,
                "host_pages": rig.host_pages.cuda(),
                "device_pages": rig.device_pages.cuda(),
                "pool": rig.pool,
                "bounds": rig.bounds,
            }
            return AppendCall(
                arena_pointer=rig.registered.device_address,
                arena_bounds_pointer=rig.saved.data_ptr(),
                **(fields | changed),
            )

        call().check(rig.shape)
        for name, wrong in (
            ("key", key.float()),
            ("value", key.repeat(2, 1, 1)),
            ("key", torch.zeros(1, 64, 2, dtype=torch.bfloat16, device="cuda").transpose(1, 2)),
            ("open_slot", index),
            ("seats", index.long()),
            ("pool", rig.pool[:, :-8]),
            ("bounds", rig.bounds[:, :, :, :64]),
        ):
            with pytest.raises(ValueError, match=name):
                call(**{name: wrong}).check(rig.shape)
    finally:
        rig.registered.close()
