"""docs/records.md says what the code does: every figure and every offset in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from services.contract.file_header import FileHeader, read_file_header, write_file_header
from services.contract.layout import FILE_HEADER_BYTES, LAYOUT_VERSION, REGION_ALIGNMENT, ArenaLayout
from services.contract.page_header import PAGE_HEADER
from services.decoder.kernels.append import make_records
from services.decoder.kernels.places import blocks_of
from services.decoder.kernels.record_code import code_records, coded_bytes
from services.decoder.kv.shape import KvShape
from services.kvstore.settings import KvStoreSettings

TEXT = (Path(__file__).resolve().parent.parent.parent / "docs/records.md").read_text()

HEADS = {"SmolLM2-135M": (30, 3, 64), "Qwen3-8B": (36, 8, 128)}
"""Model -> layers, KV heads, head_dim."""


def _shape(model: str, dtype: str, sharing: str) -> KvShape:
    layers, kv_heads, head_dim = HEADS[model]
    groups = kv_heads if sharing == "kv_head" else 1
    return KvShape(layers, kv_heads, head_dim, groups, 16, 64, getattr(torch, dtype))


def _table(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its own heading."""
    rows = TEXT.split(f"{heading}\n", 1)[1].split("\n| --- ")[1].split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


FIGURES = _table("## Figures")


@pytest.mark.parametrize("row", FIGURES, ids=[row[0] for row in FIGURES])
def test_figures(row: list[str]) -> None:
    model, dtype, sharing = row[0].split(", ")
    shape = _shape(model, dtype, sharing)
    kv, index = shape.planes(with_index=True)
    page_bytes = kv.page_bytes + index.page_bytes
    expected = [
        shape.record_elements * shape.dtype.itemsize,
        shape.block_bytes,
        kv.layers[0].page_bytes,
        index.layers[0].page_bytes,
        page_bytes,
        kv.page_bytes // shape.page_tokens,
    ]
    assert [int(cell.replace(",", "")) for cell in row[1:]] == expected
    assert index.page_bytes * 16 == kv.page_bytes, "one eighth of the keys, which are half of it"


INDEXERS = {"DeepSeek-V3.2": range(61), "GLM-5.2": (0, 1, *range(2, 78, 4))}
"""Model -> its layers that choose; 21 of GLM's 78."""
LATENT_FIGURES = _table("Models with latent records, 64-token pages:\n")


@pytest.mark.parametrize("row", LATENT_FIGURES, ids=[row[0] for row in LATENT_FIGURES])
def test_figures_of_latent_records(row: list[str]) -> None:
    model, dtype = row[0].split(", ")
    choosing = INDEXERS[model]
    layers = 78 if model == "GLM-5.2" else 61
    anchors = tuple(max(layer for layer in choosing if layer <= at) for at in range(layers))
    coded = dtype == "float8 records"
    own = torch.bfloat16 if coded else getattr(torch, dtype)
    shape = KvShape(layers, 1, 512 + 64, 1, 1, 64, own, 512, 128, anchors, record_coded=coded)
    kv, index = shape.planes(with_index=True)
    expected = [
        shape.block_bytes,
        index.layers[0].entry_bytes,
        kv.layers[0].page_bytes,
        index.layers[0].page_bytes,
        kv.page_bytes + index.page_bytes,
        kv.page_bytes // 64,
        index.page_bytes // 64,
    ]
    assert [int(cell.replace(",", "")) for cell in row[1:]] == expected
    assert sum(layer.page_bytes > 0 for layer in index.layers) == len(choosing)


def test_parts_of_a_record_in_eight_bits() -> None:
    sizes = [
        int(size) for size in re.findall(r"(\d+) bytes", TEXT.split("128 x float32")[1].split("with 512")[0])
    ]
    assert sizes == [512, 16, 128]
    assert sum(sizes) == coded_bytes(512, 64)
    numbers = torch.ones(1, 576, dtype=torch.bfloat16) * 3
    numbers[:, 512:] = 5
    codes, scales, turned = torch.split(code_records(numbers, 512)[0], sizes)
    assert torch.equal(
        codes.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)[0], torch.full((512,), 3.0)
    )
    assert bool((scales.view(torch.float32) == 3 / 384).all())
    assert bool((turned.view(torch.bfloat16) == 5).all())


def test_pages_of_the_default_arena() -> None:
    default = KvStoreSettings.model_fields["arena_bytes"].default
    assert default == 2**30
    for dtype, pages, tokens in re.findall(r"in (\w+) (?:gets )?([\d,]+) pages, ([\d,]+) tokens", TEXT):
        layout = ArenaLayout.fit(
            default, 64, _shape("SmolLM2-135M", dtype, "kv_head").planes(with_index=True)
        )
        assert layout.page_count == int(pages.replace(",", ""))
        assert layout.page_count * 64 == int(tokens.replace(",", ""))
    assert "684 pages" in TEXT
    assert "342 pages" in TEXT


def test_regions_of_the_file() -> None:
    planes = _shape("SmolLM2-135M", "float32", "kv_head").planes(with_index=True)
    layout = ArenaLayout.fit(2**30, 64, planes)
    assert FILE_HEADER_BYTES == layout.page_headers_offset == 64 * 1024
    assert REGION_ALIGNMENT == 2 * 2**20
    headers_end = 64 * 1024 + 128 * layout.page_count
    assert layout.layer_offset("kv", 0) == -(-headers_end // 2**21) * 2**21
    kv, index = planes
    assert layout.layer_offset("kv", 3) == layout.layer_offset("kv", 0) + 3 * layout.page_count * 98_304
    assert layout.layer_offset("index", 0) == layout.layer_offset("kv", 0) + layout.page_count * kv.page_bytes
    assert layout.end == layout.layer_offset("index", 0) + layout.page_count * index.page_bytes


def test_the_page_header() -> None:
    assert PAGE_HEADER.itemsize == 128
    rows = {
        cells[1]: cells[0]
        for cells in _table("### Page header, 128 bytes (`services/contract/page_header.py`)")
    }
    for field, phrase in {
        "state": "state, u32",
        "generation": "generation, u32",
        "hash_bytes": "length of the hash",
        "hash": "hash of the tokens",
        "parent": "parent: ",
        "parent_generation": "the parent's generation",
        "owner": "owner",
    }.items():
        assert PAGE_HEADER.fields is not None
        kind, offset = PAGE_HEADER.fields[field][:2]
        [place] = [where for what, where in rows.items() if what.startswith(phrase)]
        assert place == f"{offset}-{offset + kind.itemsize - 1}", field


def test_the_file_header() -> None:
    buffer = bytearray(FILE_HEADER_BYTES)
    planes = _shape("SmolLM2-135M", "float32", "kv_head").planes(with_index=True)
    header = FileHeader(64, bytes(range(32)), planes)
    write_file_header(memoryview(buffer), header)
    assert bytes(buffer[:8]) == b"HOTSETAR"
    assert int.from_bytes(buffer[8:12], "little") == LAYOUT_VERSION == 1
    length = int.from_bytes(buffer[12:16], "little")
    assert bytes(buffer[64 : 64 + length]) == header.describe()
    assert not any(buffer[64 + length :])
    assert read_file_header(memoryview(buffer)) == header


@pytest.mark.parametrize("sharing", ["kv_head", "layer"])
def test_a_record_is_keys_then_values(sharing: str) -> None:
    shape = _shape("SmolLM2-135M", "float32", sharing)
    key = torch.arange(shape.kv_heads * shape.head_dim, dtype=torch.float32).view(1, shape.kv_heads, -1)
    records = make_records(key, -key - 1, shape.groups).view(shape.groups, 2, shape.heads, shape.head_dim)
    for group in range(shape.groups):
        heads = key[0, group * shape.heads : (group + 1) * shape.heads]
        assert torch.equal(records[group, 0], heads)
        assert torch.equal(records[group, 1], -heads - 1)


def test_the_place_of_a_record() -> None:
    shape = _shape("SmolLM2-135M", "float32", "kv_head")
    pages = torch.tensor([[5, 2]])
    blocks = blocks_of(pages, shape.groups, shape.blocks_per_page)
    for group in range(3):
        for block in range(8):
            page = pages[0, block // 4]
            assert blocks[0, group, block] == (page * 3 + group) * 4 + block % 4
