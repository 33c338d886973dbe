"""attend.cu against its twin, in float64's light: any head size, groups, padding, splits, odd lengths."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from services.decoder.kernels.attend import attend_slots
from services.decoder.kernels.gpu.attend import AttendCall, AttendShape

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Case:
    head_dim: int
    group_size: int
    groups: int
    heads: int
    block_tokens: int
    top_k: int
    rows: int
    splits: int
    dtype: torch.dtype


CASES = [
    Case(64, 3, 3, 1, 16, 32, 5, 1, torch.float32),
    Case(64, 3, 1, 3, 16, 32, 5, 7, torch.float32),
    Case(80, 1, 4, 1, 16, 9, 2, 3, torch.bfloat16),
    Case(96, 2, 2, 2, 4, 33, 3, 4, torch.float16),
    Case(128, 4, 8, 1, 16, 128, 2, 16, torch.bfloat16),
    Case(128, 4, 8, 1, 16, 128, 33, 1, torch.bfloat16),
    Case(128, 8, 1, 2, 16, 20, 1, 20, torch.bfloat16),
    Case(256, 2, 2, 1, 16, 17, 2, 5, torch.float32),
    Case(256, 4, 2, 1, 64, 5, 2, 2, torch.bfloat16),
    Case(128, 1, 1, 1, 1, 200, 4, 9, torch.float32),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_twin(case: Case) -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    lanes, padding = case.rows * case.groups, 2
    pool_slots = lanes * case.top_k + 5
    pool = torch.randn(
        pool_slots, case.block_tokens, 2, case.heads, case.head_dim, device="cuda", generator=generator
    ).to(case.dtype)
    length = torch.randint(
        1, case.block_tokens * case.top_k * 2, (case.rows,), generator=torch.Generator().manual_seed(5)
    )
    slots = torch.full((lanes, case.top_k), -1, dtype=torch.int32)
    selected = slots.clone()
    free = torch.randperm(pool_slots, generator=torch.Generator().manual_seed(4)).tolist()
    for lane in range(lanes):
        opened = (int(length[lane // case.groups]) - 1) // case.block_tokens
        others = torch.randperm(opened, generator=torch.Generator().manual_seed(lane))[
            : case.top_k - 1
        ].tolist()
        blocks = [*others, opened]
        for place, block in zip(torch.randperm(case.top_k).tolist(), blocks, strict=False):
            selected[lane, place], slots[lane, place] = block, free.pop()
    query_heads = case.groups * case.heads * case.group_size
    rows = case.rows + padding
    query = torch.randn(rows, query_heads, case.head_dim, device="cuda", generator=generator).to(case.dtype)
    shape = AttendShape(case.head_dim, case.group_size, case.block_tokens, case.dtype)
    units = rows * case.groups * case.heads

    def padded(tensor: torch.Tensor, size: int) -> torch.Tensor:
        out = torch.full((size, *tensor.shape[1:]), -1, dtype=torch.int32, device="cuda")
        out[: tensor.shape[0]] = tensor
        return out

    call = AttendCall(
        query=query,
        pool=pool,
        slots=padded(slots, rows * case.groups),
        selected=padded(selected, rows * case.groups),
        length=padded(length.int(), rows),
        real_rows=torch.tensor([case.rows], dtype=torch.int32, device="cuda"),
        out=torch.full_like(query, 7.0),
        partial=torch.full((AttendCall.workspace(shape, units, case.splits),), float("nan"), device="cuda"),
        arrived=torch.zeros(units, dtype=torch.int32, device="cuda"),
        groups=case.groups,
        scaling=case.head_dim**-0.5,
        splits=case.splits,
    )
    call.check(shape)
    call.launch(shape)
    first = call.out.clone()
    call.launch(shape)
    assert torch.equal(first, call.out), "two launches differ"
    expected = attend_slots(
        query[: case.rows].double(),
        pool.double(),
        slots.cuda(),
        selected.cuda(),
        length.cuda().repeat_interleave(case.groups),
        case.head_dim**-0.5,
    )
    error = (call.out[: case.rows].double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}[case.dtype]
    assert bool((call.out[case.rows :] == 7).all()), "padding rows were written"
