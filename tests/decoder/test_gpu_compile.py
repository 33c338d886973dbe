"""Every kernel compiles for every card that is meant to run it; NVRTC needs neither driver nor GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.contract.errors import SetupError
from services.decoder.kernels.gpu.add_entry import AddEntryShape
from services.decoder.kernels.gpu.append import AppendShape
from services.decoder.kernels.gpu.append_entry import AppendEntryShape
from services.decoder.kernels.gpu.attend import AttendShape
from services.decoder.kernels.gpu.attend_latent import AttendLatentShape, PlainLatentShape
from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.gpu.code_records import CodeRecordsShape
from services.decoder.kernels.gpu.compile import compile_kernel
from services.decoder.kernels.gpu.fill_bounds import FillBoundsShape
from services.decoder.kernels.gpu.gather_pages import GatherPagesShape
from services.decoder.kernels.gpu.linear import LinearShape
from services.decoder.kernels.gpu.load_pages import LoadPagesShape
from services.decoder.kernels.gpu.locate import LocateShape
from services.decoder.kernels.gpu.merge_parts import MergePartsShape
from services.decoder.kernels.gpu.norm import NormShape
from services.decoder.kernels.gpu.pick_tokens import PickShape
from services.decoder.kernels.gpu.replay import ReplayShape
from services.decoder.kernels.gpu.resolve import ResolveShape
from services.decoder.kernels.gpu.rope import RopeShape
from services.decoder.kernels.gpu.sample import SampleShape
from services.decoder.kernels.gpu.score_blocks import ScoreBlocksShape
from services.decoder.kernels.gpu.score_tokens import ScoreShape
from services.decoder.kernels.gpu.select import SelectShape
from services.decoder.kernels.gpu.swiglu import SwigluShape
from services.decoder.kernels.gpu.write_run import WriteRunShape

CLUSTERS = {"sm_80": (1,), "sm_90": (1, 8), "sm_100": (1, 8)}  # before sm_90 there are no clusters
CARDS = {
    "sm_80": Card("A100", 8, 108, 163 * 1024),
    "sm_90": Card("H200", 9, 132, 227 * 1024),
    "sm_100": Card("B200", 10, 148, 227 * 1024),
}


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("block_bytes", "top_k", "parcels", "parcel_slots"),
    [(1152, 2048, 256, 16), (8192, 128, 1024, 8), (4096, 32, 17, 2)],
    ids=["dsa", "quest", "small"],
)
@pytest.mark.parametrize("arch", CLUSTERS)
def test_resolve_compiles(arch: str, block_bytes: int, top_k: int, parcels: int, parcel_slots: int) -> None:
    for cluster in CLUSTERS[arch]:
        shape = ResolveShape(block_bytes, top_k, parcels, parcel_slots, cluster, sweep=cluster == 1)
        code = compile_kernel("resolve", shape.defines, arch)
        assert code[:4] == b"\x7fELF"
        assert code == compile_kernel("resolve", shape.defines, arch), "the cache gave something else"


@pytest.mark.parametrize("arch", CLUSTERS)
def test_a_resolve_that_leaves_its_fetches_to_a_replay_compiles(arch: str) -> None:
    shape = ResolveShape(1152, 2048, 256, 16, CLUSTERS[arch][-1], skip_io=True)
    assert compile_kernel("resolve", shape.defines, arch)[:4] == b"\x7fELF"


def test_what_does_not_overlap_is_the_same_code() -> None:
    sizes = (128, 4, 16, torch.bfloat16, 64)
    usual, joined = (
        AttendShape.fitting(*sizes, overlaps=overlaps, card=CARDS["sm_90"]) for overlaps in (True, False)
    )
    assert usual != joined
    assert usual.defines == joined.defines
    assert usual.defines["WINDOW"] == 0


@pytest.mark.parametrize("arch", CLUSTERS)
def test_replay_compiles(arch: str) -> None:
    assert compile_kernel("replay", ReplayShape(1152).defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("arch", CLUSTERS)
def test_attend_compiles(arch: str, head_dim: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        shape = AttendShape.fitting(head_dim, 4, 16, dtype, units=64, card=CARDS[arch])
        assert compile_kernel(shape.source, shape.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", CLUSTERS)
def test_what_models_with_an_indexer_launch_compiles(arch: str, dtype: torch.dtype) -> None:
    score = ScoreShape(dim=128, heads=32, top_k=2048, page_tokens=64, dtype=dtype)
    assert score.products == (dtype != torch.float32)
    assert compile_kernel(score.source, score.defines, arch)[:4] == b"\x7fELF"
    coded = ScoreShape(128, 32, 2048, 64, torch.float16, coded=True)
    assert compile_kernel(coded.source, coded.defines, arch)[:4] == b"\x7fELF"
    assert compile_kernel("pick_tokens", PickShape(2048).defines, arch)[:4] == b"\x7fELF"
    entry = AppendEntryShape(128 * dtype.itemsize, 64)
    assert compile_kernel("append_entry", entry.defines, arch)[:4] == b"\x7fELF"
    plain = PlainLatentShape(32, 16, 1, dtype, 512)
    assert compile_kernel("attend_latent_plain", plain.defines, arch)[:4] == b"\x7fELF"
    append = AppendShape(48, 1, 1, 1, 64, dtype, sides=1)
    assert compile_kernel("append", append.defines, arch)[:4] == b"\x7fELF"
    pages = WriteRunShape(1, 1, 48 * dtype.itemsize, 64, sides=1)
    assert compile_kernel("write_run", pages.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", CLUSTERS)
def test_what_models_that_choose_blocks_launch_compiles(arch: str, dtype: torch.dtype) -> None:
    score = ScoreBlocksShape(4, 128, block_tokens=128, blocks_per_page=1, top_k=16, dtype=dtype)
    assert compile_kernel("score_blocks", score.defines, arch)[:4] == b"\x7fELF"
    add = AddEntryShape(2 * 4 * 128, entry_tokens=16, page_tokens=64, dtype=dtype)
    assert compile_kernel("add_entry", add.defines, arch)[:4] == b"\x7fELF"
    for group_size, block_tokens, window in ((16, 128, 0), (4, 64, 512)):
        shape = AttendShape(128, group_size, block_tokens, dtype, window=window)
        assert compile_kernel(shape.source, shape.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize(("latent", "heads"), [(512, 64), (128, 4)])
@pytest.mark.parametrize("arch", CLUSTERS)
def test_prefills_attend_latent_compiles(arch: str, latent: int, heads: int) -> None:
    assert AttendLatentShape.takes(latent, 64, torch.bfloat16)
    shape = AttendLatentShape.fitting(latent, 64, heads, 1, torch.bfloat16, 1, card=CARDS[arch])
    assert compile_kernel("attend_latent", shape.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("arch", CLUSTERS)
def test_attend_latent_compiles(arch: str, heads: int) -> None:
    for cluster in CLUSTERS[arch]:
        shape = AttendLatentShape.fitting(512, 64, heads, 1, torch.bfloat16, cluster, card=CARDS[arch])
        assert compile_kernel("attend_latent", shape.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", CLUSTERS)
def test_what_reads_and_writes_records_in_eight_bits_compiles(arch: str) -> None:
    cluster = max(CLUSTERS[arch])
    for heads, dtype in ((16, torch.bfloat16), (32, torch.float16), (128, torch.bfloat16)):
        shape = AttendLatentShape.fitting(512, 64, heads, 1, dtype, cluster, coded=True, card=CARDS[arch])
        assert shape.shared_bytes <= CARDS[arch].shared_bytes
        assert compile_kernel("attend_latent", shape.defines, arch)[:4] == b"\x7fELF"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        coding = CodeRecordsShape(512, 64, dtype)
        assert compile_kernel("code_records", coding.defines, arch)[:4] == b"\x7fELF"
    plain = PlainLatentShape(128, 16, 1, torch.float32, 512, coded=True)
    assert compile_kernel("attend_latent_plain", plain.defines, arch)[:4] == b"\x7fELF"
    append = AppendShape(656, 1, 1, 1, 64, torch.uint8, sides=1)
    assert compile_kernel("append", append.defines, arch)[:4] == b"\x7fELF"
    resolve = ResolveShape(656, 2048, 256, 16, cluster)
    assert compile_kernel("resolve", resolve.defines, arch)[:4] == b"\x7fELF"
    assert compile_kernel("replay", ReplayShape(656).defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", CLUSTERS)
def test_append_and_locate_compile(arch: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        append = AppendShape(64, kv_heads=3, groups=3, block_tokens=16, blocks_per_page=4, dtype=dtype)
        assert compile_kernel("append", append.defines, arch)[:4] == b"\x7fELF"
    locate = LocateShape(top_k=128, groups=8, block_tokens=16, blocks_per_page=4)
    assert compile_kernel("locate", locate.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", CLUSTERS)
def test_sample_compiles(arch: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for vocab, greedy in ((151_936, False), (50_257, False), (151_936, True)):
            for cluster in CLUSTERS[arch]:
                shape = SampleShape(vocab, dtype, greedy, cluster, in_shared=cluster > 1)
                assert compile_kernel("sample", shape.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "groups"), [(128, 8, 8), (128, 8, 1), (64, 3, 3), (80, 4, 2)]
)
@pytest.mark.parametrize("arch", CLUSTERS)
def test_select_compiles(arch: str, head_dim: int, kv_heads: int, groups: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shape = SelectShape(
            head_dim,
            kv_heads,
            groups,
            group_size=4,
            block_tokens=16,
            blocks_per_page=4,
            top_k=128,
            dtype=dtype,
        )
        assert compile_kernel("select", shape.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("arch", CLUSTERS)
def test_linear_compiles(arch: str, gated: bool) -> None:
    bulk = arch != "sm_80"
    for rows, m_tiles in ((8, 3), (16, 2), (32, 1)):
        shape = LinearShape.filling(
            rows, gated, torch.bfloat16, m_tiles if bulk else 1, bulk=bulk, card=CARDS[arch]
        )
        assert compile_kernel("linear", shape.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arch", CLUSTERS)
def test_norm_rope_and_swiglu_compile(arch: str, dtype: torch.dtype) -> None:
    for size in (576, 4096, 16384):
        assert compile_kernel("rms_norm", NormShape(size, dtype).defines, arch)[:4] == b"\x7fELF"
    assert compile_kernel("swiglu", SwigluShape(dtype).defines, arch)[:4] == b"\x7fELF"
    for head_dim in (64, 80, 96, 128, 256):
        assert compile_kernel("rope", RopeShape(head_dim, dtype).defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("arch", CLUSTERS)
def test_what_prefill_launches_compiles(arch: str, dtype: torch.dtype) -> None:
    for groups, group_bytes in ((8, 32768), (3, 192), (1, 2**18)):
        shape = GatherPagesShape(groups, group_bytes)
        assert compile_kernel("gather_pages", shape.defines, arch)[:4] == b"\x7fELF"
        pages = WriteRunShape(3, groups if groups < 8 else 3, 160, 64)
        assert compile_kernel("write_run", pages.defines, arch)[:4] == b"\x7fELF"
    bounds = FillBoundsShape(3, 80, 16, dtype)
    assert compile_kernel("fill_bounds", bounds.defines, arch)[:4] == b"\x7fELF"
    for first_wide, out_wide in ((False, False), (False, True), (True, True), (True, False)):
        merge = MergePartsShape(80, dtype, first_wide=first_wide, out_wide=out_wide)
        assert compile_kernel("merge_parts", merge.defines, arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", CLUSTERS)
def test_what_loads_pages_compiles(arch: str) -> None:
    for page_bytes in (16, 8448, 2**18):
        shape = LoadPagesShape(page_bytes)
        assert compile_kernel("load_pages", shape.defines, arch)[:4] == b"\x7fELF"


def test_a_kernel_that_does_not_compile_says_why() -> None:
    with pytest.raises(SetupError, match=r"(?s)cannot compile resolve\.cu for sm_90.*BLOCK_BYTES"):
        compile_kernel("resolve", {"CLUSTER": 1}, "sm_90")
