"""locate.cu against its twin: slots, open slots, counters, and padding rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from services.decoder.kernels.counter import Counter
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.locate import LocateCall, LocateShape
from services.decoder.kernels.twins import Twins

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Case:
    rows: int
    groups: int
    top_k: int
    block_tokens: int
    blocks_per_page: int
    blocks: int  # of the longest row


CASES = [
    Case(1, 8, 128, 16, 4, 512),
    Case(64, 8, 128, 16, 4, 2048),
    Case(5, 3, 33, 16, 4, 90),
    Case(200, 1, 2048, 1, 64, 4000),
    Case(3, 1, 1, 64, 1, 7),
    Case(2, 2, 700, 16, 4, 40),  # more than there are
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_twin(case: Case) -> None:
    chance = torch.Generator().manual_seed(5)
    padding, shape = 2, LocateShape(case.top_k, case.groups, case.block_tokens, case.blocks_per_page)
    rows, pages = case.rows + padding, -(-case.blocks // case.blocks_per_page)
    opened = torch.randint(case.blocks, (case.rows,), generator=chance)
    opened[0] = case.blocks - 1
    selected = torch.full((case.rows * case.groups, case.top_k), -1, dtype=torch.int32)
    for lane in range(selected.shape[0]):
        some = torch.randperm(int(opened[lane // case.groups]) + 1, generator=chance)[: case.top_k]
        places = torch.randperm(case.top_k, generator=chance)[: some.shape[0]]
        selected[lane, places] = some.int()
    batch = DecodeBatch(
        seats=torch.randperm(case.rows + 1, generator=chance)[: case.rows].int(),
        length=(opened * case.block_tokens + case.block_tokens // 2 + 1).int(),
        real_rows=torch.tensor([case.rows], dtype=torch.int32),
        host_pages=torch.empty(0, 0, dtype=torch.int32),
        device_pages=torch.randint(99999, (case.rows + 1, pages), generator=chance).int(),
        groups=case.groups,
        block_tokens=case.block_tokens,
        blocks_per_page=case.blocks_per_page,
        most_blocks=case.blocks,
    )

    def padded(tensor: torch.Tensor, size: int, filler: int) -> torch.Tensor:
        rest = torch.full((size - tensor.shape[0], *tensor.shape[1:]), filler, dtype=torch.int32)
        return torch.cat([tensor, rest]).cuda()

    call = LocateCall(
        selected=padded(selected, rows * case.groups, 3),
        seats=padded(batch.seats, rows, 0),
        length=padded(batch.length, rows, 1),
        real_rows=batch.real_rows.cuda(),
        device_pages=batch.device_pages.cuda(),
        slots=torch.full((rows * case.groups, case.top_k), -7, dtype=torch.int32, device="cuda"),
        open_slot=torch.full((rows * case.groups,), -7, dtype=torch.int32, device="cuda"),
        counters=torch.full((len(Counter),), 1000, dtype=torch.int64, device="cuda"),
    )
    call.check(shape)
    call.launch(shape)
    counters = torch.full((len(Counter),), 1000, dtype=torch.int64)
    expected = Twins().locate(batch, selected, counters)
    real = case.rows * case.groups
    assert torch.equal(call.slots[:real].cpu(), expected.slots)
    assert torch.equal(call.open_slot[:real].cpu(), expected.open_slot)
    assert bool((call.slots[real:] == -1).all())
    assert bool((call.open_slot[real:] == -1).all())
    assert torch.equal(call.counters.cpu(), counters)
    assert counters[Counter.HITS] > 1000


def test_what_cannot_be_right_is_refused_by_name() -> None:
    def index(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.int32, device="cuda")

    def call(**changed: torch.Tensor) -> LocateCall:
        fields = {
            "selected": index(6, 4),
            "seats": index(2),
            "length": index(2),
            "real_rows": index(1),
            "device_pages": index(2, 5),
            "slots": index(6, 4),
            "open_slot": index(6),
            "counters": torch.zeros(6, dtype=torch.int64, device="cuda"),
        }
        return LocateCall(**(fields | changed))

    shape = LocateShape(top_k=4, groups=3, block_tokens=16, blocks_per_page=4)
    call().check(shape)
    for name, wrong in (
        ("selected", index(6, 5)),
        ("slots", index(5, 4)),
        ("open_slot", index(2)),
        ("seats", index(2).long()),
        ("device_pages", index(5, 2).t()),
        ("counters", index(6)),
    ):
        with pytest.raises(ValueError, match=name):
            call(**{name: wrong}).check(shape)
