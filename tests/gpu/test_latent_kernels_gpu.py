"""The kernels that choose for models with an indexer, and sparse prefill's attention, against their twins."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.attend_chosen import attend_chosen
from services.decoder.kernels.choose_tokens import IndexQuery, score_pitch
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.latent_kernels import GpuLatentKernels
from services.decoder.kernels.index_code import code_keys, code_query, decode_keys, hadamard
from services.decoder.kernels.latent_twins import LatentTwins

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
PADDING = 2


@dataclass(frozen=True)
class Case:
    heads: int
    dim: int
    top_k: int
    page_tokens: int
    dtype: torch.dtype
    lengths: tuple[int, ...]  # of rows; the first one's last tokens are a prompt's chunk too
    coded: bool = False  # keys in eight bits


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    Case(32, 32, 16, 64, FP32, (150, 16, 17, 3, 300)),
    Case(4, 20, 16, 8, FP32, (90, 15, 16, 17)),
    Case(32, 128, 2048, 64, BF16, (9000, 2048, 2049, 1, 2047, 16384)),
    Case(64, 128, 2048, 64, BF16, (5000,)),
    Case(64, 128, 2048, 64, FP16, (5000, 30_000)),
    Case(32, 128, 100, 64, BF16, tuple(range(60, 1000, 7))),
    Case(16, 32, 512, 64, BF16, (4096, 4097, 4095, 513)),
    Case(24, 48, 64, 64, BF16, (700, 65)),
    Case(32, 128, 2048, 64, BF16, (9000, 2049), coded=True),
    Case(3, 32, 16, 64, FP32, (150, 17), coded=True),
    Case(32, 128, 2048, 64, BF16, (150_000, 3)),
]


class Rig:
    """Rows with shuffled pages, and their index keys."""

    def __init__(self, case: Case, *, exact: bool) -> None:
        """`exact`: small integers, whose products and sums are exact in any order and often equal."""
        self.case, self.exact = case, exact
        self.chance = torch.Generator().manual_seed(5)
        rows, self.pages = len(case.lengths), -(-max(case.lengths) // case.page_tokens) + 1
        count = self.pages * (rows + 1)
        self.table = torch.randperm(count, generator=self.chance).int().view(rows + 1, self.pages).cuda()
        self.seats = torch.randperm(rows + 1, generator=self.chance)[:rows].int()
        self.keys = self.numbers(count * case.page_tokens, case.dim).to(case.dtype).cuda()
        self.rotation = hadamard(case.dim, CUDA) if case.coded else None
        if self.rotation is not None:
            self.keys = code_keys(self.keys, self.rotation)
        self.kernels = GpuLatentKernels(rows + PADDING, self.pages * case.page_tokens, 16, CUDA)

    def numbers(self, *shape: int) -> Tensor:
        if self.exact:
            return torch.randint(-2, 3, shape, generator=self.chance).float()
        return torch.randn(*shape, generator=self.chance)

    def index(self, queries: int) -> IndexQuery:
        query = self.numbers(queries, self.case.heads, self.case.dim).to(self.case.dtype)
        weight = self.numbers(queries, self.case.heads).cuda()
        if self.rotation is not None:
            return IndexQuery(*code_query(query.cuda(), weight, self.rotation))
        return IndexQuery(query.cuda(), weight)

    def batch(self, padding: int = 0) -> DecodeBatch:
        real = len(self.case.lengths)
        one = torch.ones(padding, dtype=torch.int32)
        return DecodeBatch(
            seats=torch.cat([self.seats, one]).cuda(),
            length=torch.cat([torch.tensor(self.case.lengths, dtype=torch.int32), one]).cuda(),
            real_rows=torch.tensor([real], dtype=torch.int32, device=CUDA),
            host_pages=self.table,
            device_pages=self.table,
            groups=1,
            block_tokens=1,
            blocks_per_page=self.case.page_tokens,
            most_blocks=self.pages * self.case.page_tokens,
        )

    def own_keys(self, row: int) -> Tensor:
        """[tokens, dim], in their order."""
        pages = self.table[self.seats[row]].long().unsqueeze(1) * self.case.page_tokens
        places = (pages + torch.arange(self.case.page_tokens, device=CUDA)).flatten()
        keys = self.keys[places[: self.case.lengths[row]]]
        return decode_keys(keys) if self.case.coded else keys

    def check(self, chosen: Tensor, expected: Tensor, index: IndexQuery, rows: list[tuple[int, int]]) -> None:
        """The twin's set, ascending; where sums round, none that is clearly worse.

        `rows`: of each query its row, and how many tokens it sees.
        """
        for i, (row, seen) in enumerate(rows):
            mine, theirs = chosen[i].tolist(), expected[i].tolist()
            taken = [token for token in mine if token >= 0]
            assert taken == sorted(set(taken))
            assert mine[len(taken) :] == [-1] * (len(mine) - len(taken)), "none stand behind"
            assert len(taken) == min(seen, self.case.top_k)
            if self.exact and not self.case.coded:
                assert set(taken) == {token for token in theirs if token >= 0}, (row, seen)
                continue
            one = IndexQuery(index.query[i : i + 1].double(), index.weight[i : i + 1].double())
            scores = torch.einsum(
                "h,hn->n", one.weight[0], (one.query[0] @ self.own_keys(row)[:seen].double().t()).relu()
            )
            best = torch.zeros(seen, dtype=torch.bool, device=CUDA)
            best[torch.tensor(taken, device=CUDA)] = True
            if seen > self.case.top_k:
                slack = 3e-6 * float(scores.abs().max()) * self.case.heads
                assert scores[best].min() >= scores[~best].max() - slack, (row, seen)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_chooses_what_the_twin_chooses(case: Case, exact: bool) -> None:
    rig, rows = Rig(case, exact=exact), len(case.lengths)
    index = rig.index(rows + PADDING)
    real = IndexQuery(index.query[:rows], index.weight[:rows])
    expected = LatentTwins().choose(rig.batch(), rig.keys, real, case.top_k)
    chosen = rig.kernels.choose(rig.batch(PADDING), rig.keys, index, case.top_k)
    again = rig.kernels.choose(rig.batch(PADDING), rig.keys, index, case.top_k)
    assert torch.equal(chosen[:rows], again[:rows]), "two launches differ"
    rig.check(chosen[:rows].cpu(), expected.cpu(), real, list(enumerate(case.lengths)))


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "rounded"])
@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_prefill_chooses_what_the_twin_chooses(case: Case, exact: bool) -> None:
    """A chunk at the end of the first row, or all of it where that is short; in little room too."""
    rig, length = Rig(case, exact=exact), case.lengths[0]
    tokens = min(length, 700)
    start, index = length - tokens, rig.index(tokens)
    pages = rig.table[rig.seats[0]][: -(-length // case.page_tokens)].contiguous()
    call = (pages, case.page_tokens, start, rig.keys, index, case.top_k)
    expected = LatentTwins().rank(*call)
    seen = [(0, start + i + 1) for i in range(tokens)]
    chosen = rig.kernels.rank(*call)
    rig.check(chosen.cpu(), expected.cpu(), index, seen)
    rig.kernels._scores = rig.kernels._scores[: 7 * score_pitch(length)]
    assert torch.equal(rig.kernels.rank(*call), chosen)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_decode_and_prefill_score_alike(case: Case) -> None:
    """The same query chooses the same by either way, bit for bit: a replayed token meets its old choice."""
    rig, rows = Rig(case, exact=False), len(case.lengths)
    index = rig.index(rows)
    chosen = rig.kernels.choose(rig.batch(), rig.keys, index, case.top_k)
    for row, length in enumerate(case.lengths):
        pages = rig.table[rig.seats[row]][: -(-length // case.page_tokens)].contiguous()
        one = IndexQuery(index.query[row : row + 1], index.weight[row : row + 1])
        ranked = rig.kernels.rank(pages, case.page_tokens, length - 1, rig.keys, one, case.top_k)
        assert torch.equal(ranked[0], chosen[row, : ranked.shape[1]])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_new_keys_lie_on_both_sides(dtype: torch.dtype) -> None:
    case = Case(16, 40, 16, 64, dtype, (70, 200, 1, 64, 65))
    rig, rows = Rig(case, exact=False), len(case.lengths)
    key = rig.numbers(rows + PADDING, case.dim).to(dtype).cuda()
    ours, theirs = rig.keys.clone(), rig.keys.clone()
    arena = rig.numbers(*rig.keys.shape).to(dtype).pin_memory()  # whose address is the device's too
    expected = arena.cuda()
    rig.kernels.observe(rig.batch(PADDING), ours, arena, key)
    LatentTwins().observe(rig.batch(), theirs, expected, key[:rows])
    torch.cuda.synchronize()
    assert torch.equal(ours, theirs)
    assert torch.equal(arena, expected.cpu())
    assert not torch.equal(ours, rig.keys)


@pytest.mark.parametrize(
    ("heads", "latent", "roped", "dtype"),
    [(4, 32, 16, FP32), (3, 20, 12, BF16), (64, 512, 64, BF16), (16, 128, 64, FP16), (128, 512, 64, BF16)],
)
def test_sparse_prefill_over_parts(heads: int, latent: int, roped: int, dtype: torch.dtype) -> None:
    """Queries that chose many, few and none of a part's records; what lies outside is never looked at."""
    kernels = GpuLatentKernels(4, 64, heads, CUDA)
    tokens, size, top_k = 130, 700, 300
    chance = torch.Generator().manual_seed(1)
    query = torch.randn(tokens, heads, latent + roped, generator=chance).to(CUDA, dtype)
    record = torch.randn(size, latent + roped, generator=chance).to(CUDA, dtype)
    order = torch.rand(tokens, 3 * size, generator=chance).argsort(1)[:, :top_k].sort(1).values - size
    order[3], order[4, 5:], order[5] = -1, -1, 5 * size
    chosen = order.int().to(CUDA)
    part = kernels.attend_chosen(query, record, chosen, 0.1, latent)
    expected = attend_chosen(query.double().float(), record.float(), chosen, 0.1, latent)
    assert part.lse.dtype == torch.float32
    error = (part.out.float() - expected.out).norm() / expected.out.norm()
    assert error < {FP32: 1e-5, BF16: 6e-3, FP16: 1e-3}[dtype]
    assert (part.lse - expected.lse).abs().max() < 1e-3 * expected.lse.abs().clamp_max(100).max()
    assert not part.out[3].any()
    assert not part.out[5].any()
    assert bool((part.lse[3] == -1e30).all()), "two parts of nothing must still merge"


def test_scores_of_nothing_are_refused() -> None:
    case = CASES[0]
    rig = Rig(case, exact=True)
    index, batch = rig.index(len(case.lengths)), rig.batch()
    with pytest.raises(ValueError, match="query must be"):
        rig.kernels.choose(batch, rig.keys, IndexQuery(index.query[:0], index.weight[:0]), case.top_k)
    with pytest.raises(ValueError, match="entries must be"):
        rig.kernels.choose(batch, rig.keys[:, :8], index, case.top_k)
    with pytest.raises(ValueError, match="weight must be"):
        rig.kernels.choose(batch, rig.keys, IndexQuery(index.query, index.weight.half()), case.top_k)
