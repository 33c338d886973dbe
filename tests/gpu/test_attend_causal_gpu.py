"""Prefill attention on a GPU: the same values as with a mask, in little memory however long the context."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.attend import attend_causal

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Case:
    tokens: int
    start: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


CASES = [
    Case(tokens, start, heads, kv_heads, head_dim, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for tokens, start in ((300, 0), (1, 0), (1, 77), (129, 511), (64, 1))
    for heads, kv_heads, head_dim in ((9, 3, 64), (4, 4, 80), (8, 2, 96), (32, 8, 128), (2, 1, 256))
]


def made_up(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as the model's layers hand them over: heads first in memory."""
    torch.manual_seed(case.head_dim + case.start)
    lengths = ((case.heads, case.tokens), *[(case.kv_heads, case.start + case.tokens)] * 2)
    query, key, value = (
        torch.randn(heads, length, case.head_dim, device="cuda").to(case.dtype).transpose(0, 1)
        for heads, length in lengths
    )
    return query, key, value


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_a_mask(case: Case) -> None:
    query, key, value = made_up(case)
    got = attend_causal(query, key, value, case.start, case.head_dim**-0.5)
    assert got.shape == query.shape
    assert got.dtype == case.dtype
    expected = attend_causal(
        query.double().cpu(), key.double().cpu(), value.double().cpu(), case.start, case.head_dim**-0.5
    )
    error = float((got.cpu().double() - expected).norm() / expected.norm())
    assert error < {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}[case.dtype]
    again = attend_causal(query, key.contiguous(), value.contiguous(), case.start, case.head_dim**-0.5)
    assert torch.equal(again, got), "the result depends on how the keys lie in memory"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "start"), [(8192, 0), (8192, 24576), (512, 32256)])
def test_no_scores_and_no_mask_are_kept(tokens: int, start: int, dtype: torch.dtype) -> None:
    query, key, value = made_up(Case(tokens, start, 32, 8, 128, dtype))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = attend_causal(query, key, value, start, 0.09)
    torch.cuda.synchronize()
    more = torch.cuda.max_memory_allocated() - before
    assert more < 2 * out.numel() * out.element_size() + 2**24, f"{more / 2**20:.0f} MiB beyond its inputs"
