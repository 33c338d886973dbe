"""select.cu against its twin: the same set where scores are exact, ties included; else the best."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.select import SelectCall, SelectShape
from services.decoder.kernels.select import score_blocks
from services.decoder.kernels.twins import Twins

pytestmark = pytest.mark.gpu

POOL_PAGES = 61  # few, so that rows share pages and long rows meet the same scores again and again


@dataclass(frozen=True)
class Case:
    head_dim: int
    kv_heads: int
    groups: int
    group_size: int
    block_tokens: int
    blocks_per_page: int
    top_k: int
    dtype: torch.dtype
    blocks: tuple[int, ...]  # of each row, the open one included


CASES = [
    Case(128, 8, 8, 4, 16, 4, 128, torch.bfloat16, (512,)),
    Case(128, 8, 8, 4, 16, 4, 128, torch.bfloat16, (1, 127, 128, 129, 130, 2048, 700, 128, 5000, 140)),
    Case(128, 8, 1, 4, 16, 4, 128, torch.bfloat16, (512, 3, 129, 1500)),
    Case(64, 3, 3, 3, 16, 4, 32, torch.float32, (475, 33, 32, 31)),
    Case(64, 3, 1, 3, 16, 4, 32, torch.float32, (475, 64)),
    Case(64, 3, 3, 3, 16, 4, 16, torch.bfloat16, tuple(range(1, 60))),
    Case(80, 4, 2, 2, 64, 1, 9, torch.float16, (10, 200, 77)),
    Case(96, 4, 4, 1, 16, 8, 300, torch.bfloat16, (301, 299, 4097)),
    Case(256, 2, 1, 2, 16, 4, 5, torch.float32, (6, 5, 257)),
    Case(128, 32, 1, 1, 16, 4, 20, torch.float32, (90, 21)),
    Case(8, 1, 1, 1, 16, 4, 2, torch.bfloat16, (2, 3, 1000, 1)),
    Case(64, 2, 2, 1, 16, 4, 1, torch.bfloat16, (1, 2, 300)),
    Case(64, 1, 1, 8, 16, 4, 128, torch.bfloat16, (65536, 90, 300)),
    Case(64, 2, 2, 2, 1, 64, 700, torch.bfloat16, (20000, 701)),
    Case(128, 8, 8, 4, 16, 4, 128, torch.bfloat16, (300,) * 200),
    Case(8, 8, 8, 1, 16, 4, 128, torch.bfloat16, (4500,) * 40),
    Case(8, 8, 8, 1, 16, 1, 128, torch.float16, (4097, 900, 4098, 150) * 10),
]


class Rig:
    """Inputs of one case on the CPU, and the kernel's call."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.chance = torch.Generator().manual_seed(17)
        rows, pages = len(case.blocks), -(-max(case.blocks) // case.blocks_per_page)
        inside = torch.randint(1, case.block_tokens + 1, (rows,), generator=self.chance)
        self.seats = torch.randperm(rows + 2, generator=self.chance)[:rows].int()
        self.length = ((torch.tensor(case.blocks) - 1) * case.block_tokens + inside).int()
        self.device_pages = torch.randint(POOL_PAGES, (rows + 2, pages), generator=self.chance).int()
        self.shape = SelectShape(
            case.head_dim,
            case.kv_heads,
            case.groups,
            case.group_size,
            case.block_tokens,
            case.blocks_per_page,
            case.top_k,
            case.dtype,
        )

    def integers(self, highest: int, *shape: int) -> Tensor:
        """Of any sign: their products and sums are exact in any order, and often equal."""
        return torch.randint(-highest, highest + 1, shape, generator=self.chance).to(self.case.dtype)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.chance).to(self.case.dtype)

    @property
    def bounds_shape(self) -> tuple[int, ...]:
        case = self.case
        return POOL_PAGES, case.blocks_per_page, case.kv_heads, 2 * case.head_dim

    @property
    def query_shape(self) -> tuple[int, ...]:
        case = self.case
        return len(case.blocks), case.kv_heads * case.group_size, case.head_dim

    def batch(self) -> DecodeBatch:
        case = self.case
        pages = self.device_pages.cuda()
        return DecodeBatch(
            seats=self.seats.cuda(),
            length=self.length.cuda(),
            real_rows=torch.tensor([len(case.blocks)], dtype=torch.int32, device="cuda"),
            host_pages=pages,
            device_pages=pages,
            groups=case.groups,
            block_tokens=case.block_tokens,
            blocks_per_page=case.blocks_per_page,
            most_blocks=max(case.blocks),
        )

    def expected(self, bounds: Tensor, query: Tensor) -> Tensor:
        """[lanes, top_k] of the twin, ascending, -1 last."""
        chosen = Twins().select(self.batch(), bounds.cuda(), query.cuda(), self.case.top_k)
        wide = torch.full((chosen.shape[0], self.case.top_k), -1, dtype=torch.int32)
        wide[:, : chosen.shape[1]] = chosen.cpu()
        ordered = wide.masked_fill(wide < 0, 2**30).sort(1).values
        return ordered.masked_fill(ordered == 2**30, -1)

    def chosen(self, bounds: Tensor, query: Tensor, padding: int = 2) -> Tensor:
        """[lanes, top_k] of the kernel; launched twice, padding checked."""
        case, real = self.case, len(self.case.blocks)
        rows = real + padding

        def padded(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, torch.ones(padding, dtype=torch.int32)]).cuda()

        heads = query.shape[1]
        fused = torch.zeros(rows, heads + 3, case.head_dim, dtype=case.dtype, device="cuda")
        fused[:real, :heads] = query.cuda()
        keys = SelectCall.workspace(self.shape, rows, self.device_pages.shape[1])
        call = SelectCall(
            query=fused[:, :heads],
            bounds=bounds.cuda(),
            seats=padded(self.seats),
            length=padded(self.length),
            real_rows=torch.tensor([real], dtype=torch.int32, device="cuda"),
            device_pages=self.device_pages.cuda(),
            selected=torch.full((rows * case.groups, case.top_k), -7, dtype=torch.int32, device="cuda"),
            keys=torch.full((keys,), -3, dtype=torch.int32, device="cuda"),
            arrived=torch.zeros(rows * case.groups, dtype=torch.int32, device="cuda"),
        )
        call.check(self.shape)
        call.launch(self.shape)
        first = call.selected.clone()
        call.selected.fill_(-7)
        call.launch(self.shape)
        assert torch.equal(call.selected, first), "two launches differ"
        assert bool((call.selected[real * case.groups :] == -7).all()), "padding rows were written"
        assert not bool(call.arrived.any())
        return call.selected[: real * case.groups].cpu()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("highest", [0, 1, 15])
def test_exact_scores_choose_what_the_twin_chooses(case: Case, highest: int) -> None:
    rig = Rig(case)
    bounds, query = rig.integers(max(1, highest), *rig.bounds_shape), rig.integers(highest, *rig.query_shape)
    assert torch.equal(rig.chosen(bounds, query), rig.expected(bounds, query))


@pytest.mark.parametrize("spread", ["alike", "far apart", "about zero"])
@pytest.mark.parametrize("case", CASES[:9], ids=str)
def test_rounded_scores_choose_the_best(case: Case, spread: str) -> None:
    rig = Rig(case)
    low, high = rig.normal(2, *rig.bounds_shape[:3], case.head_dim).sort(0).values
    bounds, query = torch.cat([high, -low], dim=3), rig.normal(*rig.query_shape)
    if spread == "far apart":  # a few blocks tower over the rest, as a sequence's first do
        bounds[::7, 0] *= 1000
    elif spread == "about zero":
        bounds = rig.normal(*rig.bounds_shape)
    chosen = rig.chosen(bounds, query)
    pages, exact = rig.batch().row_device_pages, bounds.cuda().double()
    scores = score_blocks(exact, pages, query.cuda(), case.groups).flatten(0, 1).cpu()
    slack = 2e-6 * float(score_blocks(exact.abs(), pages, query.cuda(), case.groups).amax())
    for lane, blocks in enumerate(chosen):
        opened = case.blocks[lane // case.groups] - 1
        if opened < case.top_k:
            continue
        assert blocks[-1] == opened
        assert bool((blocks[1:] > blocks[:-1]).all())
        taken = torch.zeros(opened, dtype=torch.bool)
        taken[blocks[:-1].long()] = True
        own = scores[lane, :opened]
        if case.top_k > 1:
            assert own[taken].min() >= own[~taken].max() - slack
    # A row's choice is its own: neither the rest of the batch nor padding changes it.
    lone = Rig(Case(**{**vars(case), "blocks": case.blocks[-1:]}))
    lone.seats, lone.length, lone.device_pages = rig.seats[-1:], rig.length[-1:], rig.device_pages
    assert torch.equal(lone.chosen(bounds, query[-1:], padding=0), chosen[-case.groups :])


def test_what_cannot_be_right_is_refused_by_name() -> None:
    shape = SelectShape(64, 2, 2, 3, 16, 4, 8, torch.bfloat16)

    def index(*size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.int32, device="cuda")

    def real(*size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.bfloat16, device="cuda")

    def call(**changed: Tensor) -> SelectCall:
        fields = {
            "query": real(2, 6, 64),
            "bounds": real(9, 4, 2, 128),
            "seats": index(2),
            "length": index(2),
            "real_rows": index(1),
            "device_pages": index(3, 5),
            "selected": index(4, 8),
            "keys": index(4 * 5 * 4),
            "arrived": index(4),
        }
        return SelectCall(**(fields | changed))

    call().check(shape)
    for name, wrong in (
        ("query", real(2, 2, 64)),
        ("query", real(2, 6, 64).float()),
        ("bounds", real(9, 4, 2, 64)),
        ("seats", index(2).long()),
        ("length", index(3)),
        ("selected", index(4, 7)),
        ("keys", index(4 * 5 * 4 - 1)),
        ("arrived", index(3)),
    ):
        with pytest.raises(ValueError, match=name):
            call(**{name: wrong}).check(shape)
