"""attend.cu against its twin, in float64's light: any head size, groups, padding, splits, odd lengths.

Wherever the twin must not look - tokens past the length, slots that no lane owns - lie NaNs.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.attend import attend_slots
from services.decoder.kernels.gpu.attend import AttendCall, AttendShape

pytestmark = pytest.mark.gpu

ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
PADDING = 2


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

    @property
    def shape(self) -> AttendShape:
        """The engine's."""
        units = (self.rows + PADDING) * self.groups * self.heads
        return AttendShape.fitting(self.head_dim, self.group_size, self.block_tokens, self.dtype, units)


CASES = [
    Case(64, 3, 3, 1, 16, 32, 5, 1, torch.float32),
    Case(64, 3, 1, 3, 16, 32, 5, 7, torch.float32),
    Case(256, 2, 2, 1, 16, 17, 2, 5, torch.float32),
    Case(128, 1, 1, 1, 1, 200, 4, 9, torch.float32),
    Case(96, 16, 2, 1, 5, 20, 2, 6, torch.float32),
    Case(64, 3, 3, 1, 16, 32, 5, 1, torch.bfloat16),
    Case(80, 1, 4, 1, 16, 9, 2, 3, torch.bfloat16),
    Case(96, 2, 2, 2, 4, 33, 3, 4, torch.float16),
    Case(96, 9, 1, 8, 7, 40, 2, 12, torch.bfloat16),
    Case(128, 4, 8, 1, 16, 128, 2, 16, torch.bfloat16),
    Case(128, 4, 8, 1, 16, 128, 33, 1, torch.bfloat16),
    Case(128, 8, 1, 2, 16, 20, 1, 20, torch.bfloat16),
    Case(128, 4, 8, 1, 16, 128, 3, 16, torch.bfloat16),
    Case(128, 4, 1, 8, 16, 128, 3, 16, torch.float16),
    Case(128, 16, 1, 1, 1, 300, 4, 9, torch.bfloat16),
    Case(256, 4, 2, 1, 64, 5, 2, 2, torch.bfloat16),
    Case(256, 16, 2, 2, 3, 50, 2, 8, torch.bfloat16),
]


class Rig:
    """A pool full of NaN but for the tokens that are seen, and a launch over it."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        """`seed` moves the slots; everything else stays."""
        self.case = case
        generator = torch.Generator().manual_seed(3)
        lanes, rows = case.rows * case.groups, case.rows + PADDING
        self.length = torch.randint(
            1, case.block_tokens * case.top_k * 2, (case.rows,), generator=generator, dtype=torch.int32
        )
        self.length[0] = case.block_tokens * case.top_k  # every block full
        pool_slots = lanes * case.top_k + 5
        pool = torch.full((pool_slots, case.block_tokens, 2, case.heads, case.head_dim), float("nan"))
        self.slots = torch.full((rows * case.groups, case.top_k), -1, dtype=torch.int32)
        self.selected = self.slots.clone()
        free = torch.randperm(pool_slots, generator=torch.Generator().manual_seed(seed)).tolist()
        for lane in range(lanes):
            length = int(self.length[lane // case.groups])
            opened = (length - 1) // case.block_tokens
            others = torch.randperm(opened, generator=generator)[: case.top_k - 1].tolist()
            blocks = [*others, opened]
            places = torch.randperm(case.top_k, generator=generator).tolist()
            for place, block in zip(places, blocks, strict=False):
                self.selected[lane, place], self.slots[lane, place] = block, free.pop()
                tokens = min(case.block_tokens, length - block * case.block_tokens)
                record = torch.randn(tokens, 2, case.heads, case.head_dim, generator=generator)
                pool[self.slots[lane, place], :tokens] = record
        query_heads = case.groups * case.heads * case.group_size
        query = torch.randn(rows, query_heads, case.head_dim, generator=generator)
        self.query, self.pool = query.to("cuda", case.dtype), pool.to("cuda", case.dtype)

    def run(self, rows: int | None = None) -> Tensor:
        """Output of all rows and the padding; of the first `rows` alone, if given."""
        case, shape = self.case, self.case.shape
        many = rows or case.rows + PADDING
        units = many * case.groups * case.heads
        query = self.query[:many].contiguous()
        length = torch.full((many,), -1, dtype=torch.int32)
        length[: min(many, case.rows)] = self.length[:many]
        call = AttendCall(
            query=query,
            pool=self.pool,
            slots=self.slots[: many * case.groups].cuda(),
            selected=self.selected[: many * case.groups].cuda(),
            length=length.cuda(),
            real_rows=torch.tensor([rows or case.rows], dtype=torch.int32, device="cuda"),
            out=torch.full_like(query, 7.0),
            partial=torch.full(
                (AttendCall.workspace(shape, units, case.splits),), float("nan"), device="cuda"
            ),
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
        assert not call.arrived.any(), "the next launch would count wrongly"
        return first

    def expected(self) -> Tensor:
        case = self.case
        lanes = case.rows * case.groups
        return attend_slots(
            self.query[: case.rows].double(),
            self.pool.double().nan_to_num(),
            self.slots[:lanes].cuda(),
            self.selected[:lanes].cuda(),
            self.length.cuda().repeat_interleave(case.groups),
            case.head_dim**-0.5,
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_twin(case: Case) -> None:
    rig = Rig(case)
    out, expected = rig.run(), rig.expected()
    error = (out[: case.rows].double() - expected).norm() / expected.norm()
    assert error < ERROR[case.dtype]
    assert bool((out[case.rows :] == 7).all()), "padding rows were written"


@pytest.mark.parametrize("case", [CASES[1], CASES[8], CASES[12]], ids=str)
def test_a_row_depends_on_nothing_but_its_own_tokens(case: Case) -> None:
    rig = Rig(case)
    out = rig.run()
    moved = Rig(case, seed=9).run()
    assert torch.equal(out, moved), "other slots gave other bits"
    assert torch.equal(out[:1], rig.run(rows=1)), "alone, the row has other bits than in a batch"


def test_what_the_kernel_would_read_wrongly_is_refused() -> None:
    rig = Rig(CASES[12])
    rig.query = rig.query[:, 1:]
    with pytest.raises(ValueError, match="query has 31 heads, not 32"):
        rig.run()
