"""The kernels of models that choose blocks by themselves, against their twins."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.attend_masked import Sight
from services.decoder.kernels.block_kernels import BlockKernels
from services.decoder.kernels.block_twins import BlockTwins
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.block_kernels import GpuBlockKernels

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
PADDING = 2
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ERROR = {FP32: 1e-5, BF16: 6e-3, FP16: 1e-3}
TWINS: BlockKernels = BlockTwins()


@dataclass(frozen=True)
class Case:
    heads: int  # KV heads, and index heads
    dim: int
    block_tokens: int
    blocks_per_page: int
    top_k: int
    dtype: torch.dtype
    lengths: tuple[int, ...]  # of rows; the first one's last tokens are a prompt's chunk too


CASES = [
    Case(2, 16, 8, 8, 5, FP32, (150, 40, 41, 3, 8, 300)),
    Case(3, 20, 16, 2, 4, FP32, (90, 64, 65)),
    Case(4, 128, 128, 1, 3, FP32, (1000, 384, 385, 129, 1)),
    Case(4, 128, 128, 1, 16, BF16, (40_000, 2048, 2049, 2047, 1, 128)),
    Case(4, 128, 128, 1, 16, FP16, (9000,) * 33),
    Case(8, 64, 64, 2, 1, BF16, (5000, 64, 65)),
]


class Rig:
    """Rows with shuffled pages on both sides."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.chance = torch.Generator().manual_seed(5)
        rows = len(case.lengths)
        self.page_tokens = case.block_tokens * case.blocks_per_page
        self.pages = -(-max(case.lengths) // self.page_tokens) + 1
        self.count = self.pages * (rows + 1)
        self.tables = [
            torch.randperm(self.count, generator=self.chance).int().view(rows + 1, self.pages).cuda()
            for _ in range(2)
        ]
        self.seats = torch.randperm(rows + 1, generator=self.chance)[:rows].int()
        most = self.pages * case.blocks_per_page
        self.kernels = GpuBlockKernels(rows + PADDING, most, case.heads, CUDA)

    def numbers(self, *shape: int, exact: bool = False) -> Tensor:
        """`exact`: small integers, whose products and sums are exact in any order and often equal."""
        if exact:
            return torch.randint(-2, 3, shape, generator=self.chance).to(CUDA, self.case.dtype)
        return torch.randn(*shape, generator=self.chance).to(CUDA, self.case.dtype)

    def batch(self, padding: int = 0) -> DecodeBatch:
        case, one = self.case, torch.ones(padding, dtype=torch.int32)
        return DecodeBatch(
            seats=torch.cat([self.seats, one]).cuda(),
            length=torch.cat([torch.tensor(case.lengths, dtype=torch.int32), one]).cuda(),
            real_rows=torch.tensor([len(case.lengths)], dtype=torch.int32, device=CUDA),
            host_pages=self.tables[0],
            device_pages=self.tables[1],
            groups=case.heads,
            block_tokens=case.block_tokens,
            blocks_per_page=case.blocks_per_page,
            most_blocks=self.pages * case.blocks_per_page,
        )

    def own_pages(self, row: int) -> Tensor:
        length = self.case.lengths[row]
        return self.tables[1][self.seats[row]][: -(-length // self.page_tokens)].contiguous()


def check_same_choice(mine: Tensor, theirs: Tensor) -> None:
    """[n, heads, at most top_k]: the twin's sets, ascending, none behind."""
    for own, other in zip(mine.flatten(0, 1).tolist(), theirs.flatten(0, 1).tolist(), strict=True):
        taken = [block for block in own if block >= 0]
        assert taken == sorted(set(taken))
        assert own[len(taken) :] == [-1] * (len(own) - len(taken))
        assert set(taken) == {block for block in other if block >= 0}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_choices_are_the_twins(case: Case) -> None:
    """In decode, and of a chunk at the end of the first row, in little room too."""
    rig, rows = Rig(case), len(case.lengths)
    sizes = (rig.count, case.blocks_per_page, case.block_tokens, case.dim)
    keys = rig.numbers(*sizes, exact=True)
    query = rig.numbers(rows + PADDING, case.heads, case.dim, exact=True)
    chosen = rig.kernels.choose(rig.batch(PADDING), keys, query, case.top_k)[:rows]
    check_same_choice(chosen, TWINS.choose(rig.batch(), keys, query[:rows], case.top_k))
    tokens = min(case.lengths[0], 300)
    start, query = case.lengths[0] - tokens, rig.numbers(tokens, case.heads, case.dim, exact=True)
    call = (rig.own_pages(0), start, keys, query, case.top_k)
    ranked = rig.kernels.rank(*call)
    check_same_choice(ranked, TWINS.rank(*call))
    rig.kernels._scores = rig.kernels._scores[: 7 * case.heads * (case.lengths[0] // case.block_tokens + 4)]
    assert torch.equal(rig.kernels.rank(*call), ranked)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_decode_and_prefill_score_alike(case: Case) -> None:
    """The same query chooses the same by either way, bit for bit: a replayed token meets its old choice."""
    rig, rows = Rig(case), len(case.lengths)
    keys = rig.numbers(rig.count, case.blocks_per_page, case.block_tokens, case.dim)
    query = rig.numbers(rows, case.heads, case.dim)
    chosen = rig.kernels.choose(rig.batch(), keys, query, case.top_k)
    assert torch.equal(chosen, rig.kernels.choose(rig.batch(), keys, query, case.top_k)), (
        "two launches differ"
    )
    for row, length in enumerate(case.lengths):
        one = query[row : row + 1]
        ranked = rig.kernels.rank(rig.own_pages(row), length - 1, keys, one, case.top_k)
        assert torch.equal(ranked[0], chosen[row])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_decode_writes_lies_on_both_sides(case: Case) -> None:
    """Index keys, and sums that entries are."""
    rig, rows = Rig(case), len(case.lengths)
    keys = rig.numbers(rig.count, case.blocks_per_page, case.block_tokens, case.dim)
    each = 2 if case.block_tokens % 2 == 0 else 1
    entries = rig.numbers(rig.count, case.blocks_per_page, each, 2, case.heads, case.dim)
    key = rig.numbers(rows + PADDING, case.dim)
    added = rig.numbers(rows + PADDING, 2, case.heads, case.dim)
    for index, fresh, name in ((keys, key, "observe"), (entries, added, "add")):
        ours, theirs = index.clone(), index.clone()
        arena = index.cpu().pin_memory()  # whose address is the device's too
        expected = index.clone()
        getattr(rig.kernels, name)(rig.batch(PADDING), ours, arena, fresh)
        getattr(TWINS, name)(rig.batch(), theirs, expected, fresh[:rows])
        torch.cuda.synchronize()
        assert torch.equal(ours, theirs), name
        assert torch.equal(arena, expected.cpu()), name
        assert not torch.equal(ours, index)


@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=str)
def test_the_look_at_entries_and_its_choice(case: Case) -> None:
    rig, rows = Rig(case), len(case.lengths)
    entries = rig.numbers(rig.count, case.blocks_per_page, 4, 2, case.heads, case.dim)
    query = rig.numbers(rows + PADDING, 3 * case.heads, case.dim)
    look = rig.kernels.look(rig.batch(PADDING), entries, query)
    expected = TWINS.look(rig.batch(), entries, query[:rows])
    assert torch.allclose(look.out[:rows].float(), expected.out.float(), atol=2e-2)
    own = rig.batch().open_block
    for row, last in enumerate(own.tolist()):
        mine, theirs = (one.scores[row, :, : last + 1] for one in (look, expected))
        assert torch.allclose(mine, theirs, atol=1e-4)
    for top_k in (1, 2, case.top_k):
        chosen = rig.kernels.best(look.scores, rig.batch(PADDING).open_block, top_k)[:rows]
        check_same_choice(chosen, TWINS.best(look.scores[:rows], own, top_k))


@pytest.mark.parametrize("window", [0, 70], ids=["chosen", "window"])
@pytest.mark.parametrize(
    ("heads", "shared", "dim", "block_tokens", "dtype"),
    [(2, 3, 16, 8, FP32), (1, 16, 128, 128, BF16), (4, 16, 128, 128, BF16), (2, 4, 64, 64, FP16)],
)
def test_sparse_prefill_over_parts(
    heads: int, shared: int, dim: int, block_tokens: int, dtype: torch.dtype, window: int
) -> None:
    """A window of history and the chunk itself; tokens that chose many, one and none of their blocks."""
    chance = torch.Generator().manual_seed(1)
    tokens, top_k, start = block_tokens + 37, 5, 20 * block_tokens
    position = torch.arange(start, start + tokens)
    own = position // block_tokens
    if window:
        block = own.unsqueeze(1) - torch.arange(-(-(window - 1) // block_tokens) + 1)
        first_seen = (position + 1 - window).clamp_min(0) // block_tokens
        blocks = block.masked_fill(block < first_seen.unsqueeze(1), -1).unsqueeze(1)
    else:
        blocks = torch.stack(
            [torch.randperm(20, generator=chance)[:top_k].sort().values for _ in range(tokens * heads)]
        ).view(tokens, heads, top_k)
        blocks[..., -1] = own.unsqueeze(1)
        blocks[::5, :, :-1] = -1
    sight = Sight(start, blocks.int().to(CUDA), block_tokens, window)
    query = torch.randn(tokens, heads * shared, dim, generator=chance).to(CUDA, dtype)
    kernels = GpuBlockKernels(1, 64, heads, CUDA)
    for first, count in ((15 * block_tokens, 5 * block_tokens), (0, 4 * block_tokens), (start, tokens)):
        key, value = torch.randn(2, count, heads, dim, generator=chance).to(CUDA, dtype)
        part = kernels.attend_chosen(query, key, value, first, sight, 0.1)
        expected = TWINS.attend_chosen(query.float(), key.float(), value.float(), first, sight, 0.1)
        nothing = expected.lse == -1e30
        assert torch.equal(part.lse == -1e30, nothing), "two parts of nothing must still merge"
        assert not part.out[nothing].any()
        assert (part.out.float() - expected.out).norm() <= ERROR[dtype] * expected.out.norm()
        assert torch.allclose(part.lse[~nothing], expected.lse[~nothing], atol=2e-3)


def test_scores_of_nothing_are_refused() -> None:
    case = CASES[0]
    rig, batch = Rig(case), Rig(case).batch()
    keys = rig.numbers(rig.count, case.blocks_per_page, case.block_tokens, case.dim)
    query = rig.numbers(len(case.lengths), case.heads, case.dim)
    with pytest.raises(ValueError, match="query must be"):
        rig.kernels.choose(batch, keys, query[:0], case.top_k)
    for other in (query.half(), query[..., :8]):
        with pytest.raises(ValueError, match="keys must be"):
            rig.kernels.choose(batch, keys, other, case.top_k)
