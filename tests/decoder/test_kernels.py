"""The twins of append, bounds, select and attend against loops that anyone can check by eye."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.append import append, make_records
from services.decoder.kernels.attend import attend_slots
from services.decoder.kernels.bounds import append_bounds, fill_bounds
from services.decoder.kernels.select import all_blocks, score_blocks, top_blocks

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    query_heads: int
    kv_heads: int
    groups: int
    head_dim: int
    block_tokens: int = 4
    blocks_per_page: int = 3


CASES = (
    Case(query_heads=9, kv_heads=3, groups=3, head_dim=64),
    Case(query_heads=9, kv_heads=3, groups=1, head_dim=64),
    Case(query_heads=4, kv_heads=4, groups=4, head_dim=80, block_tokens=1),
    Case(query_heads=8, kv_heads=2, groups=1, head_dim=96, block_tokens=7, blocks_per_page=1),
    Case(query_heads=8, kv_heads=4, groups=2, head_dim=128, block_tokens=16, blocks_per_page=4),
    Case(query_heads=1, kv_heads=1, groups=1, head_dim=2),
)


each_case = pytest.mark.parametrize("case", CASES, ids=str)


def naive_score(query: Tensor, keys: Tensor, kv_head: int, per_kv: int) -> float:
    """Of one block, [tokens, kv_heads, head_dim]: sum over the KV head's query heads of Quest's bound."""
    least, most = keys[:, kv_head].amin(0), keys[:, kv_head].amax(0)
    total = 0.0
    for head in range(kv_head * per_kv, (kv_head + 1) * per_kv):
        total += sum(
            max(float(q * a), float(q * b)) for q, a, b in zip(query[head], least, most, strict=True)
        )
    return total


def naive_choice(scores: list[float], opened: int, top_k: int) -> list[int]:
    """The best blocks up to the open one, which leads; ties to the lowest block; all in order if they fit."""
    if opened < top_k:
        return [*range(opened + 1), *([-1] * (top_k - opened - 1))]
    others = sorted(range(opened), key=lambda block: (-scores[block], block))
    return [opened, *others[: top_k - 1]]


@each_case
def test_bounds_built_by_chunks_and_tokens_score_as_the_keys_themselves(case: Case) -> None:
    """Rows of odd lengths, filled by chunks and then token by token, in pages full of another's bounds."""
    torch.manual_seed(case.head_dim)
    page_tokens = case.block_tokens * case.blocks_per_page
    prompts, lengths = [3 * page_tokens + 1, page_tokens, 2, 1], [0, 0, 0, 0]
    pages = torch.randperm(24).view(4, 6)
    bounds = torch.full((24, case.blocks_per_page, case.kv_heads, 2 * case.head_dim), 1e9)  # garbage
    flat = bounds.view(-1, case.kv_heads, 2 * case.head_dim)
    keys = torch.randn(4, 6 * page_tokens, case.kv_heads, case.head_dim)

    def place(row: int, block: int) -> int:
        return int(pages[row, block // case.blocks_per_page]) * case.blocks_per_page + (
            block % case.blocks_per_page
        )

    for row, prompt in enumerate(prompts):
        half = prompt // 2 // case.block_tokens * case.block_tokens
        for start, end in ((0, half), (half, prompt)):
            if start < end:
                blocks = range(start // case.block_tokens, -(-end // case.block_tokens))
                where = torch.tensor([place(row, block) for block in blocks])
                fill_bounds(flat, keys[row, start:end], where, case.block_tokens)
        lengths[row] = prompt
    for _ in range(2 * case.block_tokens + 1):
        where = torch.tensor([place(row, lengths[row] // case.block_tokens) for row in range(4)])
        opens = torch.tensor([length % case.block_tokens == 0 for length in lengths])
        new = torch.stack([keys[row, lengths[row]] for row in range(4)])
        append_bounds(flat, new, where, opens if bool(opens.any()) else None)
        lengths = [length + 1 for length in lengths]

    query = torch.randn(4, case.query_heads, case.head_dim)
    scores = score_blocks(bounds, pages, query, case.groups)
    assert scores.shape == (4, case.groups, 6 * case.blocks_per_page)
    per_kv, heads = case.query_heads // case.kv_heads, case.kv_heads // case.groups
    top_k = 3
    opened = torch.tensor([(length - 1) // case.block_tokens for length in lengths])
    chosen = top_blocks(scores, opened, top_k)
    assert chosen.dtype == torch.int32
    for row, length in enumerate(lengths):
        for group in range(case.groups):
            expected = []
            for block in range(-(-length // case.block_tokens)):
                of_block = keys[row, block * case.block_tokens : min(length, (block + 1) * case.block_tokens)]
                kv_heads = range(group * heads, (group + 1) * heads)
                expected.append(sum(naive_score(query[row], of_block, kv, per_kv) for kv in kv_heads))
            got = scores[row, group, : len(expected)].tolist()
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-4)
            assert chosen[row, group].tolist() == naive_choice(got, int(opened[row]), top_k)


def test_a_block_is_never_worth_less_than_its_best_key() -> None:
    """The bound is an upper bound of q.k, also where the keys are all positive or all negative."""
    torch.manual_seed(1)
    for shift in (-3.0, 0.0, 3.0):
        keys, query = torch.randn(8, 1, 16) + shift, torch.randn(1, 1, 16)
        bounds = torch.zeros(1, 1, 1, 32)
        fill_bounds(bounds.view(1, 1, 32), keys, torch.tensor([0]), 8)
        score = score_blocks(bounds, torch.zeros(1, 1, dtype=torch.int64), query, 1)
        assert float(score) >= float((keys[:, 0] @ query[0, 0]).max()) - 1e-4


def test_scores_of_bfloat16_bounds_are_summed_in_float32() -> None:
    bounds = torch.ones(1, 1, 1, 2 * 512, dtype=torch.bfloat16)
    query = torch.ones(1, 1, 512, dtype=torch.bfloat16) + torch.tensor(2**-7, dtype=torch.bfloat16)
    score = score_blocks(bounds, torch.zeros(1, 1, dtype=torch.int64), query, 1)
    assert score.dtype == torch.float32
    assert float(score) == 512 * (1 + 2**-7)  # 516: bfloat16 has no such number


@pytest.mark.parametrize("top_k", [1, 2, 5, 8, 9, 30])
@pytest.mark.parametrize("groups", [1, 3])
def test_top_blocks_is_the_naive_choice(groups: int, top_k: int) -> None:
    """Scores from a few values, so that most of them tie; what lies past a row's end is another's."""
    chance = random.Random(top_k)
    opened = [0, 1, 4, 7, 8, 11]
    scores = torch.tensor(
        [[[float(chance.choice([0, 1, 1, 2])) for _ in range(12)] for _ in range(groups)] for _ in opened]
    )
    for row, last in enumerate(opened):
        scores[row, :, last + 1 :] = NAN if row % 2 else 1e30
    got = top_blocks(scores, torch.tensor(opened), top_k)
    width = min(top_k, 12)
    assert got.shape == (len(opened), groups, width)
    for row, last in enumerate(opened):
        for group in range(groups):
            expected = naive_choice(scores[row, group].tolist(), last, width)
            assert got[row, group].tolist() == expected


def test_all_blocks_pads_with_minus_one() -> None:
    got = all_blocks(torch.tensor([0, 2, 3]), 2, 4)
    assert got.dtype == torch.int32
    assert got.tolist() == [[row, row] for row in ([0, -1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3])]


def naive_attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """One query [head_dim] over [n, head_dim] keys and values, in float64."""
    scores = [math.fsum((query.double() * key.double()).tolist()) * scaling for key in keys]
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    return sum((w * v.double() for w, v in zip(weights, values, strict=True)), torch.zeros(1)) / sum(weights)


@each_case
def test_attend_slots_is_softmax_over_the_chosen_positions(case: Case) -> None:
    """Every slot that no lane chose holds NaN, and so must never be multiplied, not even by zero."""
    torch.manual_seed(case.head_dim)
    chance = random.Random(case.head_dim)
    rows, top_k = 3, 4
    heads, per_kv = case.kv_heads // case.groups, case.query_heads // case.kv_heads
    lanes = rows * case.groups
    pool = torch.full((lanes * top_k + 5, case.block_tokens, 2, heads, case.head_dim), NAN)
    free = list(range(pool.shape[0]))
    chance.shuffle(free)
    slots = torch.full((lanes, top_k), -1, dtype=torch.int32)
    selected = slots.clone()
    lengths = [1, 5 * case.block_tokens, 9 * case.block_tokens + 1]
    for lane in range(lanes):
        opened = (lengths[lane // case.groups] - 1) // case.block_tokens
        count = min(top_k, opened + 1, 1 + lane % top_k)
        blocks = [opened, *chance.sample(range(opened), count - 1)]
        for column, block in zip(chance.sample(range(top_k), count), blocks, strict=True):
            selected[lane, column] = block
            slots[lane, column] = free.pop()
            pool[slots[lane, column]] = torch.randn(case.block_tokens, 2, heads, case.head_dim)
    query = torch.randn(rows, case.query_heads, case.head_dim)
    length = torch.tensor(lengths).repeat_interleave(case.groups)
    got = attend_slots(query, pool, slots, selected, length, 0.3)
    for row in range(rows):
        for head in range(case.query_heads):
            group, inner = divmod(head // per_kv, heads)
            lane = row * case.groups + group
            seen = [
                (int(slot), offset)
                for slot, block in zip(slots[lane], selected[lane], strict=True)
                for offset in range(case.block_tokens)
                if block >= 0 and int(block) * case.block_tokens + offset < lengths[row]
            ]
            keys = torch.stack([pool[slot, offset, 0, inner] for slot, offset in seen])
            values = torch.stack([pool[slot, offset, 1, inner] for slot, offset in seen])
            expected = naive_attention(query[row, head], keys, values, 0.3)
            assert torch.allclose(got[row, head].double(), expected, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_records_are_token_major_keys_before_values(groups: int) -> None:
    tokens, kv_heads, head_dim = 3, 4, 5
    key = torch.arange(tokens * kv_heads * head_dim).view(tokens, kv_heads, head_dim)
    value = -1 - key
    records = make_records(key, value, groups)
    heads = kv_heads // groups
    assert records.shape == (tokens * groups, 2 * heads * head_dim)
    for token in range(tokens):
        for group in range(groups):
            expected = [
                int(side[token, group * heads + head, d])
                for side in (key, value)
                for head in range(heads)
                for d in range(head_dim)
            ]
            assert records[token * groups + group].tolist() == expected


def test_append_writes_both_sides_and_nothing_else() -> None:
    records = torch.arange(1, 7).view(2, 3)
    pool, arena = torch.zeros(5, 3, dtype=torch.int64), torch.zeros(9, 3, dtype=torch.int64)
    append(records, pool, torch.tensor([4, 0]), arena, torch.tensor([2, 7]))
    assert pool.tolist() == [[4, 5, 6], [0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 2, 3]]
    assert {i: row for i, row in enumerate(arena.tolist()) if any(row)} == {2: [1, 2, 3], 7: [4, 5, 6]}
