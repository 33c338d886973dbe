"""Prefill's attention in parts on a GPU: values, sums, the merge, and that nothing grows with the lengths."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part, attend_part, merge_parts
from services.decoder.kernels.gather_pages import gather_pages
from services.decoder.kernels.gpu.step_kernels import GpuKernels

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
ERROR = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


@dataclass(frozen=True)
class Case:
    tokens: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool


CASES = [
    Case(tokens, keys, heads, kv_heads, head_dim, dtype, tokens == keys)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for tokens, keys in ((300, 300), (1, 1), (1, 77), (129, 512), (64, 1), (512, 512), (512, 2048))
    for heads, kv_heads, head_dim in ((9, 3, 64), (4, 4, 80), (8, 2, 96), (32, 8, 128), (2, 1, 256))
]


def made(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Query as the layers hand it over; key and value as a window holds them, a head after the other."""
    torch.manual_seed(case.head_dim + case.keys)
    query = torch.randn(case.tokens, case.heads, case.head_dim, device=CUDA).to(case.dtype)
    both = torch.randn(case.kv_heads, case.keys, 2, case.head_dim, device=CUDA).to(case.dtype)
    return query, both[:, :, 0].transpose(0, 1), both[:, :, 1].transpose(0, 1)


def on_the_cpu(part: Part | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double().cpu() for tensor in part)


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_sums_are_the_cpus(case: Case) -> None:
    query, key, value = made(case)
    got = attend_part(query, key, value, case.head_dim**-0.5, causal=case.causal)
    wide = on_the_cpu((query, key, value))
    expected = attend_part(wide[0], wide[1], wide[2], case.head_dim**-0.5, causal=case.causal)
    assert got.out.shape == query.shape
    assert got.out.dtype == case.dtype
    assert got.lse.dtype == torch.float32
    assert difference(got.out, expected.out) < ERROR[case.dtype]
    assert torch.allclose(got.lse.cpu().double(), expected.lse, atol=1e-3)
    again = attend_part(query, key, value, case.head_dim**-0.5, causal=case.causal)
    assert torch.equal(again.out, got.out)


@pytest.mark.parametrize("sizes", [(300, 9, 64), (1, 4, 80), (512, 32, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merge_is_the_twins(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    kernels = GpuKernels(1, 1, CUDA)
    tokens, heads, head_dim = sizes
    torch.manual_seed(tokens)
    for first_dtype in (dtype, torch.float32):
        for out_dtype in (dtype, torch.float32):
            parts = [
                Part(
                    torch.randn(heads, tokens, head_dim, device=CUDA).to(of).transpose(0, 1),
                    torch.randn(heads, tokens, device=CUDA).mul_(8).t(),
                )
                for of in (first_dtype, dtype)
            ]
            got = kernels.merge_parts(parts[0], parts[1], out_dtype)
            first, second = (Part(*on_the_cpu(part)) for part in parts)
            expected = merge_parts(first, second, torch.float64)
            assert got.out.dtype == out_dtype
            assert difference(got.out, expected.out) < ERROR[out_dtype]
            assert torch.allclose(got.lse.cpu().double(), expected.lse, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_pages_are_the_twins(dtype: torch.dtype) -> None:
    kernels = GpuKernels(1, 1, CUDA)
    for groups, page_tokens, elements in ((8, 64, 256), (1, 64, 384), (3, 12, 16)):
        source = torch.randn(37, groups, page_tokens, elements, device=CUDA).to(dtype)
        for count in (1, 2, 19):
            pages = torch.randperm(37, device=CUDA)[:count].int()
            got, expected = source.new_zeros(2, groups, count * page_tokens, elements).unbind(0)
            kernels.gather_pages(source, pages, got)
            gather_pages(source, pages, expected)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "keys"), [(4096, 4096), (4096, 16384), (500, 16384), (16384, 16384)])
def test_no_scores_and_no_copies_of_keys_are_kept(tokens: int, keys: int, dtype: torch.dtype) -> None:
    query, key, value = made(Case(tokens, keys, 32, 8, 128, dtype, tokens == keys))
    attend_part(query[:512], key[:512], value[:512], 0.09, causal=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attend_part(query, key, value, 0.09, causal=tokens == keys).out
    torch.cuda.synchronize()
    more = torch.cuda.max_memory_allocated() - before
    assert more < 2 * out.numel() * out.element_size() + 2**24, f"{more / 2**20:.0f} MiB beyond its inputs"
