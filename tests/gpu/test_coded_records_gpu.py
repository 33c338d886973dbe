"""Latent records in eight bits on the GPU: coded as the twin does, byte for byte, and attended to like that.

Wherever nobody may look - slots that no row owns, tokens that nobody chose - lie bytes that are no numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.attend_chosen import attend_chosen
from services.decoder.kernels.attend_latent import attend_latent
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.code_records import CodeRecordsCall, CodeRecordsShape
from services.decoder.kernels.gpu.latent_kernels import GpuLatentKernels
from services.decoder.kernels.gpu.step_kernels import GpuKernels
from services.decoder.kernels.record_code import code_records, coded_bytes
from services.decoder.kernels.twins import Twins

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ERROR = {BF16: 4e-3, FP16: 6e-4, FP32: 1e-5}
SCALING = 192**-0.5
PADDING = 2


@dataclass(frozen=True)
class Case:
    heads: int
    latent: int
    roped: int
    dtype: torch.dtype
    top_k: int = 70
    rows: int = 3


CASES = [
    Case(4, 128, 16, FP32),
    Case(3, 128, 12, BF16),
    Case(4, 128, 64, BF16),
    Case(16, 512, 64, BF16, 2048, 2),
    Case(24, 512, 64, FP16, 300),
    Case(64, 512, 64, BF16, 2048, 9),
    Case(128, 512, 64, BF16, 501),
]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def odd_records(latent: int, roped: int, dtype: torch.dtype) -> Tensor:
    """Of all sizes that the type knows, and some that are none."""
    sizes = torch.logspace(-7, 4, 40) if dtype == FP16 else torch.logspace(-30, 30, 40)
    records = numbers(40, latent + roped) * sizes.unsqueeze(1)
    records[0] = 0
    records[1, :5] = torch.tensor([448, 449, -447.0, 1e-9, 0.0])
    records[2, 3] = records[3, latent + 1] = float("nan")
    records[4, 7] = float("-inf")
    records[5, :128] *= torch.logspace(-8, 3, 128)
    records[6, :latent] = 1.75 / 8
    records[7, :latent] = -1.75 / 8
    records[8, :3] = torch.tensor([-0.0, 5e-45, -5e-45])
    return records.to(dtype)


def batch_of(
    device: torch.device, seats: Tensor, length: Tensor, rows: int, table: Tensor, most: int
) -> DecodeBatch:
    """Of records: one group, blocks of one token."""
    return DecodeBatch(
        seats=seats.to(device),
        length=length.to(device),
        real_rows=torch.tensor([rows], dtype=torch.int32, device=device),
        host_pages=table.to(device),
        device_pages=table.to(device),
        groups=1,
        block_tokens=1,
        blocks_per_page=64,
        most_blocks=most,
    )


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("latent", "roped"), [(512, 64), (128, 16), (256, 12), (384, 8)])
def test_bytes_are_the_twins(latent: int, roped: int, dtype: torch.dtype) -> None:
    records = odd_records(latent, roped, dtype)
    coded = GpuLatentKernels(4, 64, 16, CUDA).code(records.to(CUDA), latent)
    assert torch.equal(coded.cpu(), code_records(records, latent))


def test_every_number_is_coded_as_the_twin_codes_it() -> None:
    """All bfloat16 up to 448 and their neighbours, in tiles whose scale is 1."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).float()
    bits = bits[bits.isfinite()]
    values = torch.cat([bits, bits * (1 + 2**-12), bits * (1 - 2**-12)])
    values = values[values.abs() <= 448]
    rows = values[: values.numel() // 127 * 127].view(-1, 127)
    records = torch.cat([torch.full((len(rows), 1), 448.0), rows, torch.zeros(len(rows), 8)], 1)
    coded = GpuLatentKernels(4, 64, 16, CUDA).code(records.to(CUDA), 128)
    assert torch.equal(coded.cpu(), code_records(records, 128))


def test_what_the_kernel_would_read_wrongly_is_refused() -> None:
    shape = CodeRecordsShape(128, 16, BF16)
    record = torch.zeros(3, 144, dtype=BF16, device=CUDA)
    coded = torch.zeros(3, 176, dtype=torch.uint8, device=CUDA)
    CodeRecordsCall(record, coded).check(shape)
    for name, call in (
        ("record", CodeRecordsCall(record.float(), coded)),
        ("record", CodeRecordsCall(record[:, :128], coded)),
        ("record", CodeRecordsCall(record[:0], coded[:0])),
        ("coded", CodeRecordsCall(record, coded[:2])),
        ("coded", CodeRecordsCall(record, coded.view(torch.int8))),
    ):
        with pytest.raises(ValueError, match=f"{name} must"):
            call.check(shape)
    with pytest.raises(ValueError, match="latent must be tiles of 128"):
        CodeRecordsCall(record, coded).check(CodeRecordsShape(96, 48, BF16))


def test_bytes_are_appended_on_both_sides() -> None:
    rows, pages, width = 5, 3, 656
    chance = torch.Generator().manual_seed(4)
    table = torch.randperm((rows + 1) * pages, generator=chance).int().view(rows + 1, pages)
    pool = torch.randint(256, (rows + 4, width), generator=chance).to(torch.uint8)
    arena = torch.randint(256, (table.numel() * 64, width), generator=chance).to(torch.uint8)
    record = code_records(numbers(rows + PADDING, 576), 512).unsqueeze(1)
    open_slot = torch.randperm(rows + 4, generator=chance)[: rows + PADDING].int()
    seats = torch.arange(rows + PADDING).remainder(rows + 1).int()
    length = torch.tensor([1, 64, 65, 150, 192, 1, 1]).int()

    def batch(many: int, device: torch.device) -> DecodeBatch:
        return batch_of(device, seats[:many], length[:many], rows, table, pages * 64)

    expected_pool, expected_arena = pool.clone(), arena.clone()
    none = record[..., :0]
    key, value = record[:rows], none[:rows]
    cpu = batch(rows, torch.device("cpu"))
    Twins().append(cpu, open_slot[:rows], key, value, expected_pool, expected_arena, None)
    ours, saved = pool.to(CUDA), arena.pin_memory()  # whose address is the device's too
    GpuKernels(8, 1, CUDA).append(
        batch(rows + PADDING, CUDA), open_slot.to(CUDA), record.to(CUDA), none.to(CUDA), ours, saved, None
    )
    torch.cuda.synchronize()
    assert torch.equal(ours.cpu(), expected_pool)
    assert torch.equal(saved, expected_arena)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_attends_as_the_twin_does(case: Case) -> None:
    slots, size = case.rows * case.top_k + 9, coded_bytes(case.latent, case.roped)
    chance = torch.Generator().manual_seed(3)
    pool = torch.full((slots, 1, size), 255, dtype=torch.uint8)
    length = torch.randint(1, 2 * case.top_k, (case.rows + PADDING,), generator=chance).int()
    length[0] = case.top_k
    selected = torch.full((case.rows + PADDING, case.top_k), -1, dtype=torch.int32)
    taken, free = selected.clone(), torch.randperm(slots, generator=chance)
    for row in range(case.rows):
        tokens = torch.randperm(int(length[row]), generator=chance)[: case.top_k]
        places = torch.randperm(case.top_k, generator=chance)[: len(tokens)]
        mine, free = free[: len(tokens)], free[len(tokens) :]
        selected[row, places], taken[row, places] = tokens.int(), mine.int()
        pool[mine, 0] = code_records(numbers(len(tokens), case.latent + case.roped, seed=row), case.latent)
    query = numbers(case.rows + PADDING, case.heads, case.latent + case.roped).to(case.dtype)
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = batch_of(CUDA, torch.zeros_like(length), length, case.rows, table, case.top_k)
    kernels = GpuLatentKernels(case.rows + PADDING, 64, case.heads, CUDA)
    call = (query.to(CUDA), pool.to(CUDA), taken.to(CUDA), selected.to(CUDA), SCALING, case.latent)
    out = kernels.attend(batch, *call)[: case.rows].cpu().double()
    again = kernels.attend(batch, *call)[: case.rows].cpu().double()
    assert torch.equal(out, again), "two launches differ"
    own = slice(case.rows)
    expected = attend_latent(
        query[own].double(), pool, taken[own], selected[own], length[own].long(), SCALING, case.latent
    )
    assert (out - expected).norm() / expected.norm() < ERROR[case.dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sparse_prefill_attends_as_the_twin_does(case: Case) -> None:
    """Queries that chose many, few and none of a part's records."""
    tokens, size, top_k = 130, 700, 300
    chance = torch.Generator().manual_seed(1)
    query = numbers(tokens, case.heads, case.latent + case.roped).to(case.dtype)
    record = code_records(numbers(size, case.latent + case.roped, seed=2), case.latent)
    order = torch.rand(tokens, 3 * size, generator=chance).argsort(1)[:, :top_k].sort(1).values - size
    order[3], order[4, 5:] = -1, -1
    chosen = order.int()
    kernels = GpuLatentKernels(4, 64, case.heads, CUDA)
    part = kernels.attend_chosen(query.to(CUDA), record.to(CUDA), chosen.to(CUDA), 0.1, case.latent)
    expected = attend_chosen(query.float(), record, chosen, 0.1, case.latent)
    error = (part.out.cpu().float() - expected.out).norm() / expected.out.norm()
    assert error < {FP32: 1e-5, BF16: 6e-3, FP16: 1e-3}[case.dtype]
    assert (part.lse.cpu() - expected.lse).abs().max() < 1e-3 * expected.lse.abs().clamp_max(100).max()
    assert not part.out[3].any()
    assert bool((part.lse[3] == -1e30).all()), "two parts of nothing must still merge"
