"""Prefill's attention in parts: whatever the cut, the whole is plain softmax attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part, attend_part, merge_parts
from services.decoder.kernels.gather_pages import gather_pages

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = [(9, 3, 64), (4, 4, 80), (8, 1, 32)]  # query heads, kv heads, head_dim
SCALING = 0.2


def made(tokens: int, sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, head_dim = sizes
    generator = torch.Generator().manual_seed(tokens + head_dim)
    key, value = torch.randn(2, tokens, kv_heads, head_dim, generator=generator)
    return torch.randn(tokens, heads, head_dim, generator=generator), key, value


def plain(query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
    """Softmax over all keys up to each query, which stand at `start` and following; in float64."""
    per_kv = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(x.double().repeat_interleave(per_kv, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALING
    hidden = torch.arange(key.shape[0]) > torch.arange(start, start + query.shape[0]).unsqueeze(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(2), value)


def in_parts(query: Tensor, key: Tensor, value: Tensor, start: int, window: int) -> Tensor:
    """As the heart does it."""
    earlier: Part | None = None
    for at in range(0, start, window):
        run = slice(at, min(at + window, start))
        part = attend_part(query, key[run], value[run], SCALING, causal=False)
        earlier = part if earlier is None else merge_parts(earlier, part, torch.float32)
    own = attend_part(query, key[start:], value[start:], SCALING, causal=True)
    return own.out if earlier is None else merge_parts(earlier, own, query.dtype).out


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("window", [1, 4, 5, 16])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 13), (1, 1), (4, 9), (5, 1), (12, 4), (16, 7)])
def test_any_cut_gives_the_whole(sizes: tuple[int, int, int], window: int, start: int, tokens: int) -> None:
    query, key, value = made(start + tokens, sizes)
    got = in_parts(query[start:], key, value, start, window)
    expected = plain(query[start:], key, value, start)
    assert got.shape == expected.shape
    assert torch.allclose(got.double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once_a_part(dtype: torch.dtype) -> None:
    query, key, value = (part.to(dtype) for part in made(61, (8, 2, 64)))
    got = in_parts(query[40:], key, value, 40, 16)
    expected = plain(query[40:], key, value, 40)
    assert got.dtype == dtype
    error = float((got.double() - expected).norm() / expected.norm())
    assert error < {torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]


def test_a_part_that_weighs_nothing_or_everything() -> None:
    """Scores of one part that lie hundreds above the other's: no overflow, no NaN."""
    query, key, value = made(8, (2, 1, 32))
    low, high = (
        attend_part(query[:1], key[:4], value[:4], SCALING, causal=False),
        Part(value[:1].expand(-1, 2, -1), torch.full((1, 2), 500.0)),
    )
    for pair in ((low, high), (high, low)):
        both = merge_parts(*pair, torch.float32)
        assert torch.equal(both.out, high.out)
        assert (both.lse == 500).all()


def test_pages_are_gathered_by_group_in_token_order() -> None:
    source = torch.arange(5 * 3 * 4 * 2).view(5, 3, 4, 2).float()  # pages, groups, tokens, elements
    out = torch.full((3, 8, 2), -1.0)
    gather_pages(source, torch.tensor([4, 1], dtype=torch.int32), out)
    for group in range(3):
        for token in range(8):
            assert out[group, token].tolist() == source[[4, 1][token // 4], group, token % 4].tolist()
