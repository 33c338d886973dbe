"""write_run.cu and fill_bounds.cu against their twins: a prompt's records and bounds, nothing beside them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.bounds import fill_bounds
from services.decoder.kernels.gpu.step_kernels import GpuKernels
from services.decoder.kernels.write_run import write_run

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")


@dataclass(frozen=True)
class Case:
    kv_heads: int
    groups: int
    head_dim: int
    page_tokens: int
    first: int
    tokens: int


CASES = [
    Case(8, 8, 128, 64, 0, 4096),
    Case(8, 1, 128, 64, 16, 1),
    Case(3, 3, 64, 64, 48, 200),
    Case(4, 2, 80, 12, 11, 2),
    Case(2, 2, 8, 8, 0, 8),
]


def run_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Key as the layers make it, value as a part of the fused projection: its tokens lie apart."""
    torch.manual_seed(case.tokens)
    qkv = torch.randn(case.tokens, 3 * case.kv_heads, case.head_dim, device=CUDA).to(dtype)
    return qkv[:, : case.kv_heads].contiguous(), qkv[:, 2 * case.kv_heads :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_records_are_the_twins(case: Case, dtype: torch.dtype) -> None:
    key, value = run_of(case, dtype)
    count = -(-(case.first + case.tokens) // case.page_tokens)
    pages = torch.randperm(count + 5, device=CUDA)[:count].int()
    elements = 2 * case.kv_heads // case.groups * case.head_dim
    got, expected = torch.full(
        (2, count + 5, case.groups, case.page_tokens, elements), 7.0, dtype=dtype, device=CUDA
    ).unbind(0)
    GpuKernels(1, 1, CUDA).write_run(key, value, got, pages, case.first)
    write_run(key, value, expected, pages, case.first)
    assert torch.equal(got, expected)
    laid_apart = key.transpose(0, 1).contiguous().transpose(0, 1)
    GpuKernels(1, 1, CUDA).write_run(laid_apart, value, got.fill_(7.0), pages, case.first)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bounds_are_the_twins(case: Case, block_tokens: int, dtype: torch.dtype) -> None:
    key, apart = run_of(case, dtype)
    key[0, 0, 3] = float("nan")
    blocks = -(-case.tokens // block_tokens)
    block = torch.randperm(blocks + 3, device=CUDA)[:blocks]
    size = (2, blocks + 3, case.kv_heads, 2 * case.head_dim)
    for side in (key, apart):
        got, expected = torch.full(size, 7.0, dtype=dtype, device=CUDA).unbind(0)
        GpuKernels(1, 1, CUDA).fill_bounds(got, side, block, block_tokens)
        fill_bounds(expected, side, block, block_tokens)
        assert torch.equal(got.nan_to_num(99), expected.nan_to_num(99))


def test_what_the_kernels_would_read_wrongly_is_refused() -> None:
    kernels = GpuKernels(1, 1, CUDA)
    key = torch.zeros(5, 2, 8, device=CUDA)
    pages = torch.zeros(1, dtype=torch.int32, device=CUDA)
    with pytest.raises(ValueError, match="1 pages do not hold 5 tokens from 4 on"):
        kernels.write_run(key, key, torch.zeros(3, 2, 8, 16, device=CUDA), pages, 4)
    with pytest.raises(ValueError, match="target must be contiguous"):
        kernels.write_run(key, key, torch.zeros(3, 2, 8, 15, device=CUDA), pages, 0)
    with pytest.raises(ValueError, match=r"block must be \[2\] int64"):
        kernels.fill_bounds(torch.zeros(4, 2, 16, device=CUDA), key, pages.long(), 4)
