"""attend_latent.cu against its twin, in float64's light: heads, padding, splits, clusters, odd lengths.

Wherever the twin must not look - tokens past the length, slots that no row owns - lie NaNs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.attend_latent import attend_latent
from services.decoder.kernels.gpu.attend_latent import AttendLatentCall, AttendLatentShape
from services.decoder.kernels.gpu.card import Card

pytestmark = pytest.mark.gpu

ERROR = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
LATENT, ROPED, PADDING = 512, 64, 2
BF16 = torch.bfloat16
CARD = Card.current() if torch.cuda.is_available() else Card("any", 9, 132, 227 * 1024)  # to be collected


@dataclass(frozen=True)
class Case:
    heads: int
    shape: AttendLatentShape
    top_k: int
    rows: int
    splits: int


def variant(heads: int, block_tokens: int, dtype: torch.dtype, cluster: int) -> AttendLatentShape:
    """The engine's."""
    return AttendLatentShape.fitting(LATENT, ROPED, heads, block_tokens, dtype, cluster, card=CARD)


CASES = [
    Case(1, variant(1, 1, BF16, 1), 70, 3, 1),
    Case(16, variant(16, 1, BF16, 1), 2048, 2, 32),
    Case(16, variant(16, 1, BF16, 8), 2048, 2, 32),
    Case(16, variant(16, 1, torch.float16, 8), 2048, 9, 8),
    Case(24, variant(24, 1, BF16, 8), 300, 3, 8),
    Case(128, variant(128, 1, BF16, 8), 2048, 3, 16),
    Case(70, variant(70, 1, BF16, 2), 501, 2, 6),
    Case(40, variant(40, 3, torch.float16, 8), 100, 2, 8),
    Case(5, variant(5, 64, BF16, 8), 9, 4, 8),
]


class Rig:
    """A pool full of NaN but for the tokens that are seen, and a launch over it."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        """`seed` moves the slots; everything else stays."""
        self.case = case
        generator = torch.Generator().manual_seed(3)
        block_tokens, rows = case.shape.block_tokens, case.rows + PADDING
        self.length = torch.randint(
            1, block_tokens * case.top_k * 2, (case.rows,), generator=generator, dtype=torch.int32
        )
        self.length[0] = block_tokens * case.top_k  # every block full
        pool_slots = case.rows * case.top_k + 5
        pool = torch.full((pool_slots, block_tokens, LATENT + ROPED), float("nan"))
        self.slots = torch.full((rows, case.top_k), -1, dtype=torch.int32)
        self.selected = self.slots.clone()
        free = torch.randperm(pool_slots, generator=torch.Generator().manual_seed(seed)).int()
        for row in range(case.rows):
            length = int(self.length[row])
            opened = (length - 1) // block_tokens
            others = torch.randperm(opened, generator=generator)[: case.top_k - 1]
            blocks = torch.cat([others, torch.tensor([opened])]).int()
            places = torch.randperm(case.top_k, generator=generator)[: blocks.shape[0]]
            mine, free = free[: blocks.shape[0]], free[blocks.shape[0] :]
            self.selected[row, places], self.slots[row, places] = blocks, mine
            pool[mine.long()] = torch.randn(
                blocks.shape[0], block_tokens, LATENT + ROPED, generator=generator
            )
            pool[mine[-1], length - opened * block_tokens :] = float("nan")
        query = torch.randn(rows, case.heads, LATENT + ROPED, generator=generator)
        self.query, self.pool = query.to("cuda", case.shape.dtype), pool.to("cuda", case.shape.dtype)

    def run(self, rows: int | None = None) -> Tensor:
        """Output of all rows and the padding; of the first `rows` alone, if given."""
        case = self.case
        many = rows or case.rows + PADDING
        length = torch.full((many,), -1, dtype=torch.int32)
        length[: min(many, case.rows)] = self.length[:many]
        sizes = (case.shape, many, case.heads)
        call = AttendLatentCall(
            query=self.query[:many].contiguous(),
            pool=self.pool,
            slots=self.slots[:many].cuda(),
            selected=self.selected[:many].cuda(),
            length=length.cuda(),
            real_rows=torch.tensor([rows or case.rows], dtype=torch.int32, device="cuda"),
            out=torch.full((many, case.heads, LATENT), 7.0, dtype=case.shape.dtype, device="cuda"),
            partial=torch.full(
                (AttendLatentCall.workspace(*sizes, case.splits),), float("nan"), device="cuda"
            ),
            arrived=torch.zeros(AttendLatentCall.arrivals(*sizes), dtype=torch.int32, device="cuda"),
            scaling=192**-0.5,
            splits=case.splits,
        )
        call.check(case.shape)
        call.launch(case.shape)
        first = call.out.clone()
        call.launch(case.shape)
        assert torch.equal(first, call.out), "two launches differ"
        assert not call.arrived.any(), "the next launch would count wrongly"
        return first

    def expected(self) -> Tensor:
        rows = self.case.rows
        return attend_latent(
            self.query[:rows].double(),
            self.pool.double().nan_to_num(),
            self.slots[:rows].cuda(),
            self.selected[:rows].cuda(),
            self.length.cuda(),
            192**-0.5,
            LATENT,
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_twin(case: Case) -> None:
    rig = Rig(case)
    out, expected = rig.run(), rig.expected()
    error = (out[: case.rows].double() - expected).norm() / expected.norm()
    assert error < ERROR[case.shape.dtype]
    assert bool((out[case.rows :] == 7).all()), "padding rows were written"


@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=str)
def test_a_row_depends_on_nothing_but_its_own_tokens(case: Case) -> None:
    rig = Rig(case)
    out = rig.run()
    moved = Rig(case, seed=9).run()
    assert torch.equal(out, moved), "other slots gave other bits"
    assert torch.equal(out[:1], rig.run(rows=1)), "alone, the row has other bits than in a batch"


def test_splits_that_no_cluster_divides_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the cluster"):
        Rig(replace(CASES[6], splits=5)).run()
