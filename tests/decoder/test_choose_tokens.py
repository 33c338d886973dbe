"""DSA's choice and the attention over it, against plain loops over every query."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from services.decoder.kernels import attend_chosen as attend_chosen_module
from services.decoder.kernels import choose_tokens as choose_tokens_module
from services.decoder.kernels.attend_chosen import attend_chosen
from services.decoder.kernels.attend_part import merge_parts
from services.decoder.kernels.choose_tokens import IndexQuery, choose_tokens

HEADS, SIZE = 8, 16


class Case(NamedTuple):
    start: int
    tokens: int
    top_k: int


CASES = [
    Case(0, 1, 4),  # the first token of all
    Case(0, 40, 16),  # from everything to a choice
    Case(15, 1, 16),  # exactly everything
    Case(16, 1, 16),  # one more
    Case(37, 25, 16),
    Case(5, 3, 100),  # never more than there is
    Case(100, 7, 1),
]


def index_of(tokens: int, seed: int) -> IndexQuery:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(tokens, HEADS, SIZE, generator=generator)
    return IndexQuery(query, torch.randn(tokens, HEADS, generator=generator))


def plain(index: IndexQuery, key: Tensor, at: int, top_k: int) -> list[int]:
    """Of one query at position `at`: best first, ties to the lowest token."""
    scores = [
        float((index.weight[0] * (index.query[0] @ key[token]).relu()).sum()) for token in range(at + 1)
    ]
    return sorted(range(at + 1), key=lambda token: (-scores[token], token))[:top_k]


@pytest.mark.parametrize("window", [7, 64, 2048])
@pytest.mark.parametrize("case", CASES)
def test_a_choice_is_the_best_of_what_a_query_sees(
    case: Case, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_tokens_module, "_WINDOW", window)
    monkeypatch.setattr(choose_tokens_module, "_SCORES_AT_ONCE", window * HEADS * 5)  # five queries at once
    end = case.start + case.tokens
    generator = torch.Generator().manual_seed(1)
    places = torch.randperm(200, generator=generator)[:end]
    keys = torch.full((200, SIZE), float("nan"))  # of other rows
    keys[places] = key = torch.randn(end, SIZE, generator=generator)
    index = index_of(case.tokens, 2)
    chosen = choose_tokens(index, keys, places, case.start, case.top_k)
    assert chosen.shape == (case.tokens, min(case.top_k, end))
    assert chosen.dtype == torch.int32
    for i in range(case.tokens):
        at = case.start + i
        one = IndexQuery(index.query[i : i + 1], index.weight[i : i + 1])
        found = [token for token in chosen[i].tolist() if token >= 0]
        expected = plain(one, key, at, case.top_k)
        assert found == (list(range(at + 1)) if at < case.top_k else expected)


def test_ties_go_to_the_lowest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they lie in different windows: only tokens 5 and 33 have a score above 0."""
    monkeypatch.setattr(choose_tokens_module, "_WINDOW", 10)
    keys = torch.zeros(40, SIZE)
    keys[5, 0] = keys[33, 0] = 1
    index = IndexQuery(torch.ones(1, HEADS, SIZE), torch.ones(1, HEADS))
    chosen = choose_tokens(index, keys, torch.arange(40), 39, 6)
    assert chosen.tolist() == [[5, 33, 0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [(90,), (30, 30, 30), (64, 26)])
def test_attention_over_parts_is_attention_over_the_choice(
    parts: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some queries choose nothing in a part, and one nothing in the first two."""
    tokens, heads, latent, roped, top_k = 9, 3, 12, 4, 6
    monkeypatch.setattr(attend_chosen_module, "_SCORES_AT_ONCE", 2 * heads * 90)  # two queries at once
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(tokens, heads, latent + roped, generator=generator).to(dtype)
    record = torch.randn(90, latent + roped, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(90, generator=generator)[:top_k] for _ in range(tokens)]).int()
    chosen[1] = torch.arange(80, 80 + top_k)
    chosen[2, 3:] = -1
    whole, at = None, 0
    for size in parts:
        part = attend_chosen(query, record[at : at + size], chosen - at, 0.3, latent)
        whole = part if whole is None else merge_parts(whole, part, torch.float32)
        at += size
    assert whole is not None
    for i in range(tokens):
        own = record[chosen[i][chosen[i] >= 0].long()].double()
        weight = (query[i].double() @ own.t() * 0.3).softmax(1)
        torch.testing.assert_close(whole.out[i].double(), weight @ own[:, :latent], atol=1e-5, rtol=1e-4)
