"""Latent records in eight bits: what the code keeps, what it loses, and what it does with odd numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.record_code import TILE, code_records, coded_bytes, decode_records, roped_at

LATENT, ROPED = 512, 64
MOST = 448.0  # the largest e4m3


def numbers(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def back(records: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Coded, and decoded again."""
    return decode_records(code_records(records, LATENT), LATENT, records.shape[1] - LATENT, dtype)


def scales(records: Tensor) -> Tensor:
    """[n, tiles], from the bytes."""
    coded = code_records(records, LATENT)
    return coded[:, LATENT : LATENT + LATENT // TILE * 4].contiguous().view(torch.float32)


def records_of(*tops: float) -> Tensor:
    """A record each, whose tiles' largest number is that."""
    records = torch.zeros(len(tops), LATENT + ROPED)
    records[:, :LATENT:TILE] = torch.tensor(tops).unsqueeze(1)
    return records


def test_a_record_of_the_published_models_has_656_bytes() -> None:
    assert (coded_bytes(512, 64), roped_at(512)) == (656, 528)
    assert code_records(numbers(3, 576), 512).shape == (3, 656)
    assert coded_bytes(128, 16) == 176, "scales are padded to 16 bytes"
    assert coded_bytes(128, 12) == 176, "and so is the end"
    assert not code_records(numbers(3, 140), 128)[:, [*range(132, 144), *range(168, 176)]].any()


def test_a_number_comes_back_within_its_last_bit() -> None:
    """Half of e4m3's last bit is a sixteenth of a number; below 2^-6 of the scale, bits end at 2^-9 of it."""
    records = numbers(400, LATENT + ROPED) * torch.logspace(-20, 20, 400).unsqueeze(1)
    records[:, 5] *= 300
    error = (back(records) - records).abs()
    unit = scales(records).repeat_interleave(TILE, 1)
    assert bool((error[:, :LATENT] <= torch.maximum(records[:, :LATENT].abs() / 16, unit / 1024)).all())
    assert bool((error[:, LATENT:] <= records[:, LATENT:].abs() / 256).all()), "of bfloat16"
    tiles = slice(TILE, LATENT)
    relative = error[:, tiles].double().norm(dim=1) / records[:, tiles].double().norm(dim=1)
    assert 0.02 < float(relative.mean()) < 0.03
    assert error[:, :LATENT].any()


def test_an_outlier_costs_its_own_tile_alone() -> None:
    records = numbers(50, LATENT + ROPED)
    spoilt = records.clone()
    spoilt[:, 7] = 1e6
    kept, lost = back(records), back(spoilt)
    assert torch.equal(kept[:, TILE:], lost[:, TILE:])
    assert torch.equal(lost[:, 7], back(records_of(1e6))[:, 0].expand(50))
    assert not lost[:, 8:TILE].any(), "a millionth of the largest number is none"


@pytest.mark.parametrize("exponent", [-90, -3, 0, 1, 60])
def test_a_scale_is_the_least_power_of_two_that_will_do(exponent: int) -> None:
    most = MOST * 2.0**exponent
    above = torch.nextafter(torch.tensor(most), torch.tensor(float("inf"))).item()
    found = scales(records_of(most, above, most / 2, -most, -above))
    expected = torch.tensor([1.0, 2.0, 0.5, 1.0, 2.0]) * 2.0**exponent
    assert torch.equal(found, expected.unsqueeze(1).expand(-1, 4))
    assert torch.equal(back(records_of(most, -most))[:, 0], torch.tensor([most, -most])), "kept exactly"


def test_every_code_is_met_and_rounded_to() -> None:
    """All 2 x 127 numbers of e4m3 come back as they are; halfway between two the even is taken."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn).float()
    records = torch.zeros(2, LATENT + ROPED)
    records[:, :LATENT:TILE] = MOST  # so that the scale is 1
    for record, half in enumerate(values.chunk(2)):
        records[record, 1 : 1 + TILE - 1] = half
    assert torch.equal(back(records), records)
    steps = values[:127]  # from nothing up, by neighbours
    between = (steps[:-1] + steps[1:]) / 2
    records = records_of(MOST)
    records[0, 1:TILE] = torch.nn.functional.pad(between, (0, 1))
    even = torch.stack([steps[:-1], steps[1:]], 1)[torch.arange(126), torch.arange(126) % 2]
    assert torch.equal(back(records)[0, 1:127], even)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoded_numbers_are_the_same_in_every_type(dtype: torch.dtype) -> None:
    """Products with powers of two are exact, so 16 bits hold all of a code."""
    records = numbers(100, LATENT + ROPED).to(torch.bfloat16)
    assert torch.equal(back(records, dtype).float(), back(records))
    assert torch.equal(back(records.float()), back(records))


def test_what_was_coded_once_is_not_changed_by_coding_it_again() -> None:
    once = back(numbers(200, LATENT + ROPED) * 3)
    assert torch.equal(back(once), once)


def test_nothing_and_next_to_nothing() -> None:
    records = records_of(0.0, 1e-38, 5e-45, 1e-20)
    found = back(records)
    assert not found[:3].any()
    assert float(found[3, 0]) == pytest.approx(1e-20, rel=1 / 16)
    assert bool(scales(records).isfinite().all())
    assert not code_records(records, LATENT)[0, :LATENT].any()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_makes_its_tile_none_and_never_another(odd: float, dtype: torch.dtype) -> None:
    """As it would in a dot product; a logit that is no number ends its request with an error."""
    records = numbers(3, LATENT + ROPED).to(dtype)
    clean = back(records)
    records[1, TILE + 3] = odd
    found = back(records)
    assert bool(found[1, TILE : 2 * TILE].isnan().all())
    others = torch.ones_like(found, dtype=torch.bool)
    others[1, TILE : 2 * TILE] = False
    assert torch.equal(found[others], clean[others])
    records[0, LATENT + 9] = odd
    assert back(records)[0, LATENT + 9].isnan() == (odd != odd)
    assert back(records)[0, :LATENT].isfinite().all()


def test_no_number_has_one_code() -> None:
    """Bytes are compared between devices, and NaNs have many."""
    records = numbers(2, LATENT + ROPED)
    records[0, 3] = records[0, LATENT] = float("nan")
    other = records.clone()
    other[0, 3] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    other[0, LATENT] = torch.tensor(0x7FABCDEF, dtype=torch.int32).view(torch.float32)
    assert torch.equal(code_records(records, LATENT), code_records(other, LATENT))
