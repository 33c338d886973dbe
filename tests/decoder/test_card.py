"""Every variant that a card is given fits into its shared memory, or the error says what does not and why."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver

from services.contract.errors import SetupError
from services.decoder.engine import lane_slots
from services.decoder.kernels.gpu import kernel
from services.decoder.kernels.gpu.attend import AttendShape
from services.decoder.kernels.gpu.attend_latent import AttendLatentShape
from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.gpu.compile import compile_kernel
from services.decoder.kernels.gpu.linear import MOST_ROWS, LinearShape
from services.decoder.kernels.gpu.resolve import ResolveShape
from services.decoder.kernels.gpu.sample import SampleShape
from services.decoder.settings import DecoderSettings

H200 = Card("NVIDIA H200", 9, 132, 227 * 1024)
CARDS = {
    "sm_80": Card("NVIDIA A100", 8, 108, 163 * 1024),
    "sm_86": Card("NVIDIA A10", 8, 72, 99 * 1024),
    "sm_90": H200,
    "sm_100": Card("NVIDIA B200", 10, 148, 227 * 1024),
    "sm_120": Card("NVIDIA RTX PRO 6000", 12, 188, 99 * 1024),
}
BF16 = torch.bfloat16
PRODUCTS = (
    (6144, 4096, False),
    (4096, 4096, False),
    (12288, 4096, True),
    (960, 576, False),
    (1536, 576, True),
)
"""Features, depth, gated."""

Variant = AttendShape | AttendLatentShape | LinearShape | ResolveShape | SampleShape


def attend(card: Card) -> Iterator[AttendShape]:
    for head_dim, group_size in ((64, 3), (80, 4), (96, 1), (128, 4), (128, 8), (256, 8)):
        for units in (1, 16, 17, 128, 129, 4096):
            for dtype in (torch.float32, BF16):
                yield AttendShape.fitting(head_dim, group_size, 16, dtype, units, card=card)


def attend_latent(card: Card) -> Iterator[AttendLatentShape]:
    for heads in (1, 16, 17, 32, 33, 64, 128):
        for latent in (128, 512):
            cluster = 8 if card.has_clusters else 1
            for coded in (False, True):
                yield AttendLatentShape.fitting(latent, 64, heads, 1, BF16, cluster, coded=coded, card=card)
                yield AttendLatentShape.fitting(latent, 64, heads, 1, BF16, 1, coded=coded, card=card)


def linear(card: Card) -> Iterator[LinearShape]:
    for features, depth, gated in PRODUCTS:
        for rows in (1, 8, 9, 16, 32):
            shape = LinearShape.fitting(rows, features, depth, gated, BF16, card=card)
            assert shape is not None
            yield shape


def resolve(card: Card) -> Iterator[ResolveShape]:
    for block_bytes, top_k, parcel_slots in ((1152, 2048, 16), (8192, 128, 8), (4096, 32, 2)):
        slots = min(32_768, ResolveShape.most_slots(top_k, parcel_slots, card))
        for parcels in (slots // parcel_slots, (top_k + 1) // parcel_slots + 1):
            for lanes in (1, 8, 64, 512):
                yield ResolveShape.fitting(block_bytes, top_k, parcels, parcel_slots, lanes, card=card)


def sample(card: Card) -> Iterator[SampleShape]:
    for vocab in (49_152, 151_936, 262_144):
        for greedy in (True, False):
            yield from SampleShape.variants(vocab, torch.float32, greedy=greedy, card=card)


def variants(card: Card) -> set[Variant]:
    made = (attend(card), attend_latent(card), linear(card), resolve(card), sample(card))
    return {shape for each in made for shape in each}


def name_of(shape: Variant) -> str:
    match shape:
        case AttendShape():
            return shape.source
        case AttendLatentShape():
            return "attend_latent"
        case LinearShape():
            return "linear"
        case ResolveShape():
            return "resolve"
        case SampleShape():
            return "sample"


def static_bytes(code: bytes, name: str, reserved: int) -> int:
    """Of shared memory, by the section that a cubin has for it, which begins with what is `reserved`."""
    table, entries, names = *struct.unpack_from("<Q", code, 0x28), *struct.unpack_from("<2H", code, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + 64 * i) for i in range(entries)]
    strings = sections[names][4]
    for section in sections:
        at = strings + section[0]
        if code[at : code.index(b"\0", at)] == f".nv.shared.{name}".encode():
            return int(section[5]) - reserved
    return 0


@pytest.mark.parametrize("arch", CARDS)
def test_every_variant_that_is_chosen_fits(arch: str) -> None:
    card = CARDS[arch]
    shapes = variants(card)
    assert {name_of(shape) for shape in shapes} == {
        *("attend", "attend_plain", "attend_latent", "linear", "resolve", "sample")
    }
    for shape in shapes:
        assert shape.shared_bytes + 1024 <= card.shared_bytes, shape
        if isinstance(shape, LinearShape):
            assert shape.slots >= 8
            assert shape.bulk == (card.major >= 9)


@pytest.mark.slow
@pytest.mark.parametrize("arch", CARDS)
def test_every_variant_that_is_chosen_compiles_and_fits_with_what_the_kernel_takes_besides(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reserved = 1024 if CARDS[arch].major >= 9 else 0  # for the system, and not counted
    seen = 0
    for shape in variants(CARDS[arch]):
        name = name_of(shape)
        static = static_bytes(compile_kernel(name, shape.defines, arch), name, reserved)
        assert static >= 0
        seen += bool(static)
        assert static + shape.shared_bytes <= CARDS[arch].shared_bytes, shape
    assert seen > 10, "no section was found"


def test_what_an_h200_is_given_is_what_was_measured_on_one() -> None:
    """docs/log.md's and docs/speed.md's figures are of these."""
    depths = [AttendShape.fitting(128, 4, 16, BF16, units, card=H200).depth for units in (16, 17, 128, 129)]
    assert depths == [2, 3, 3, 1]
    depths = [AttendShape.fitting(64, 3, 16, BF16, units, card=H200).depth for units in (16, 17, 128, 129)]
    assert depths == [4, 6, 6, 2]
    for heads, chosen in (
        (16, (16, 4, 1)),
        (17, (32, 8, 2)),
        (32, (32, 8, 2)),
        (33, (64, 8, 3)),
        (128, (64, 8, 3)),
    ):
        latent = AttendLatentShape.fitting(512, 64, heads, 1, BF16, 8, card=H200)
        assert (latent.head_tile, latent.warps, latent.depth) == chosen
    tiles = {
        1: [(3, 30), (2, 43), (3, 30), (1, 73), (2, 43)],
        16: [(3, 24), (2, 34), (3, 24), (1, 53), (2, 34)],
        32: [(3, 17), (2, 23), (3, 17), (1, 34), (2, 23)],
    }
    for rows, wanted in tiles.items():
        shapes = [LinearShape.fitting(rows, f, d, gated, BF16, card=H200) for f, d, gated in PRODUCTS]
        assert [(shape.m_tiles, shape.slots) for shape in shapes if shape is not None] == wanted
    assert LinearShape.fitting(MOST_ROWS + 1, 4096, 4096, False, BF16, card=H200) is None
    lanes = {
        (1152, 2048, 256, 16, 1): (8, 1024),
        (1152, 2048, 256, 16, 8): (4, 256),
        (1152, 2048, 256, 16, 64): (1, 128),
        (1152, 2048, 2048, 16, 64): (2, 64),
        (8192, 128, 1024, 8, 8): (8, 256),
        (8192, 128, 1024, 8, 256): (1, 64),
    }
    for sizes, chosen_here in lanes.items():
        resolved = ResolveShape.fitting(*sizes, card=H200)
        assert (resolved.cluster, resolved.copy_threads) == chosen_here


def test_what_no_variant_fits_is_refused_with_the_cards_limit_and_what_to_change() -> None:
    a10, a100 = CARDS["sm_86"], CARDS["sm_80"]
    has = r"NVIDIA A10 has 101,376; "
    with pytest.raises(
        SetupError, match=rf"32 query heads a KV head of 256 needs [\d,]+ bytes .* {has}.*--device"
    ):
        AttendShape.fitting(256, 32, 16, BF16, 8, card=a10)
    with pytest.raises(SetupError, match=rf"records of 2048 \+ 64 needs .* {has}.*--device cpu"):
        AttendLatentShape.fitting(2048, 64, 16, 1, BF16, 1, card=a10)
    message = r"lane of 32,768 hot slots, 2,048 of them .* A100 has 166,912; lower --max-model-len"
    with pytest.raises(SetupError, match=message):
        ResolveShape.fitting(1152, 2048, 2048, 16, 8, card=a100)
    assert LinearShape.fitting(8, 4096, 4096, False, BF16, card=Card("tiny", 9, 8, 16 * 1024)) is None


@pytest.mark.parametrize("arch", CARDS)
def test_a_lane_as_long_as_the_plan_may_make_it_can_be_ordered(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = CARDS[arch]
    monkeypatch.setattr(Card, "current", lambda: card)
    for budget, block, wanted in ((2048, 1, 32_768 if card.has_clusters else None), (2048, 16, None)):
        settings = DecoderSettings.model_validate(
            {"model": "m", "budget_tokens": budget, "block_tokens": block}
        )
        slots = lane_slots.lane_slots_of(settings, torch.device("cuda:0"))
        assert slots == (wanted or slots)
        assert slots > 2 * budget // block
        top_k, size = budget // block, 16 if block == 1 else 8
        for lanes in (1, 64, 1024):
            ResolveShape.fitting(4096, top_k, slots // size, size, lanes)
    assert lane_slots.lane_slots_of(settings, torch.device("cpu")) == 32_768


def test_a_kernel_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chose it: the driver says `invalid value` and nothing else."""
    codes = driver.CUresult

    def allow(function: int, attribute: int, value: int) -> tuple[driver.CUresult]:
        return (codes.CUDA_SUCCESS if value <= 100_000 else codes.CUDA_ERROR_INVALID_VALUE,)

    fake = SimpleNamespace(
        CUresult=codes,
        CUfunction_attribute=driver.CUfunction_attribute,
        cuGetErrorName=lambda status: (codes.CUDA_SUCCESS, status.name.encode()),
        cuLibraryLoadData=lambda *_: (codes.CUDA_SUCCESS, 1),
        cuLibraryGetKernel=lambda *_: (codes.CUDA_SUCCESS, 2),
        cuKernelGetFunction=lambda *_: (codes.CUDA_SUCCESS, 3),
        cuFuncSetAttribute=allow,
    )
    monkeypatch.setattr(kernel, "driver", fake)
    monkeypatch.setattr(kernel, "compile_kernel", lambda *_: b"")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(Card, "current", lambda: CARDS["sm_86"])
    kernel.Kernel("select", {"TOP_K": 8}, threads=256, cluster=1, shared_bytes=100_000)
    message = r"select\.cu with \{'TOP_K': 8\} needs 101,000 bytes of .* NVIDIA A10 has 101,376; serve"
    with pytest.raises(SetupError, match=message):
        kernel.Kernel("select", {"TOP_K": 8}, threads=256, cluster=1, shared_bytes=101_000)
