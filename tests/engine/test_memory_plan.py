"""The memory plan's sums against figures worked out by hand and against what is really allocated."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig

from services.contract.errors import SetupError
from services.contract.layout import ArenaLayout
from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.memory_plan import MemoryPlan, kv_fingerprint, kv_planes, kv_shape
from services.decoder.kernels.twins import Twins
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.bounds_index import BoundsIndex
from services.decoder.kv.full import Full
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.row_tables import RowTables
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings

CPU = torch.device("cpu")
SMOLLM2 = ModelSpec(
    path=Path("/nowhere"),
    config=LlamaConfig(),
    layers=30,
    query_heads=9,
    kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_positions=8192,
    eos_token_ids=(2,),
    weights_digest=bytes(32),
)
SMALL = dataclasses.replace(SMOLLM2, layers=3, head_dim=8)
WEIGHTS = 269_030_016


def settings(**changes: object) -> DecoderSettings:
    return DecoderSettings.model_validate({"model": Path("/nowhere"), "budget_tokens": 2048} | changes)


def derive(
    spec: ModelSpec = SMOLLM2,
    dtype: torch.dtype = torch.bfloat16,
    arena_bytes: int = 2**30,
    device: torch.device = CPU,
    **changes: object,
) -> MemoryPlan:
    asked = settings(**changes)
    shape = kv_shape(asked, spec, dtype)
    layout = ArenaLayout.fit(arena_bytes, shape.page_tokens, kv_planes(asked, shape))
    return MemoryPlan.derive(asked, spec, shape, layout, WEIGHTS, device)


def test_smollm2_by_hand() -> None:
    plan = derive()
    # A record is a key and a value of one head, 2 x 64 x 2 bytes; a block 16; a lane 2 x 2,048 tokens.
    assert plan.shape.block_bytes == 16 * 2 * 64 * 2 == 4096
    assert plan.max_model_len == 8192
    assert plan.capacities == (256,) * 30
    assert plan.top_k == 128
    assert plan.hot_bytes == 8 * 3 * 256 * 30 * 4096 == 754_974_720
    assert plan.resident_bytes == 0
    assert plan.device_pages == 8 * 128
    # Bounds of a page: 4 blocks x 3 heads x 2 x 64 x 2 bytes.
    assert plan.index_bytes == 30 * 1024 * 3072 == 94_371_840
    assert plan.token_bytes == 30 * 3 * 2 * 64 * 2 == 23_040
    assert (plan.max_pages, plan.max_blocks) == (128, 512)
    rows, lanes = 4 * 8 * 2 * 128, 4 * 24 * 30 * (512 + 3 * 256 + 1)
    assert plan.table_bytes == rows + lanes == 3_697_472
    assert plan.layout.page_count == 684


def test_full_mode_keeps_kv_in_device_pages_and_no_hot_buffer() -> None:
    plan = derive(kv_mode="full", device_cache_tokens=10_000)
    assert plan.hot_bytes == 0
    assert plan.device_pages == 157  # 10,000 tokens in pages of 64
    assert plan.resident_bytes == 157 * 64 * 23_040
    assert plan.table_bytes == 4 * 8 * 2 * 128


@pytest.mark.parametrize("sharing", ["kv_head", "layer"])
@pytest.mark.parametrize("dense", [0, 1, 3])
@pytest.mark.parametrize("selector", ["quest", "everything"])
@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_what_is_planned_is_what_is_allocated(
    tmp_path: Path, sharing: str, dense: int, selector: str, mode: str
) -> None:
    plan = derive(
        SMALL,
        torch.float32,
        8 * 2**20,
        max_rows=2,
        max_model_len=500,
        budget_tokens=64,
        quest_sharing=sharing,
        dense_layers=dense,
        selector=selector,
        kv_mode=mode,
    )
    shape, rows = plan.shape, 2
    (tmp_path / "arena").touch()
    with (tmp_path / "arena").open("r+b") as file:
        file.truncate(plan.layout.arena_bytes)
    arena = ArenaMap(tmp_path / "arena", plan.layout, shape, torch.device("cpu"))
    tables = RowTables(rows, plan.max_pages, CPU)
    table_bytes = tables.host_pages.nbytes + tables.device_pages.nbytes
    if mode == "tiered":
        hot = HotBuffer(shape, rows, plan.max_blocks, plan.capacities, CPU)
        assert plan.hot_bytes == sum(pool.nbytes for pool in hot.pools) > 0
        for lanes in hot.tables:
            parts = (lanes.block_to_slot, lanes.slot_to_block, lanes.order, lanes.resident, lanes.pool_slot)
            table_bytes += sum(part.nbytes for part in parts)
        assert plan.resident_bytes == 0
    else:
        full = Full(Twins(), arena, shape, plan.device_pages, tables)
        assert plan.resident_bytes == sum(full.pool(layer).nbytes for layer in range(shape.layers))
        assert plan.hot_bytes == 0
    assert plan.table_bytes == table_bytes
    assert plan.quest_layers == (3 - dense if selector == "quest" else 0)
    if plan.quest_layers:
        index = BoundsIndex(arena, shape, plan.device_pages, plan.quest_layers, CPU)
        assert plan.index_bytes == index.pool.nbytes
        assert index.layer(2).device.data_ptr() == index.pool[-1].data_ptr()
    else:
        assert plan.index_bytes == 0
    dense_layers = 3 - plan.quest_layers
    assert plan.capacities == (32,) * dense_layers + (8,) * plan.quest_layers


def test_rows_of_the_longest_length_all_fit_the_device_cache_by_default() -> None:
    plan = derive(max_model_len=65, max_rows=8)
    assert plan.max_pages == 2
    assert plan.device_pages == 16


def test_a_small_arena_shortens_what_one_may_ask() -> None:
    plan = derive(arena_bytes=32 * 2**20)
    assert plan.max_model_len == plan.layout.page_count * 64 < 8192


def test_capacity_never_exceeds_the_longest_row() -> None:
    assert set(derive(max_model_len=640, budget_tokens=1024).capacities) == {40}


@pytest.mark.parametrize(
    ("arena_bytes", "changes", "message"),
    [
        (2**30, {"max_model_len": 8193}, r"--max-model-len 8193 exceeds the model's 8192 positions"),
        (
            2**25,
            {"max_model_len": 8192},
            r"--max-model-len 8192 exceeds the 1280 tokens that the arena holds \(32 MiB\); start",
        ),
        (
            2**30,
            {"device_cache_tokens": 8191},
            r"--device-cache-tokens 8191 is less than one request of 8192 tokens",
        ),
        (2**30, {"dense_layers": 31}, r"--dense-layers 31: the model has 30 layers"),
    ],
    ids=["model", "arena", "device", "layers"],
)
def test_what_cannot_be_is_refused(arena_bytes: int, changes: dict[str, object], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        derive(SMOLLM2, torch.bfloat16, arena_bytes, CPU, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_tokens": 72}, "multiples of block_tokens"),
        ({"budget_tokens": 1000}, "multiples of block_tokens"),
        ({"hot_tokens": 1024}, "at least budget_tokens"),
        ({"max_rows": 8, "max_step_tokens": 23}, r"max_rows \+ block_tokens = 24"),
        ({"block_tokens": 64, "max_step_tokens": 64}, r"max_rows \+ block_tokens = 72"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        settings(**changes)


def test_the_table_says_where_memory_goes() -> None:
    lines = {line[:19].strip(): line[19:].split() for line in derive().table().splitlines()}
    assert lines["hot buffer"] == ["720", "MiB", "8", "rows,", "256", "blocks", "a", "lane"]
    assert lines["selector's index"] == ["90", "MiB", "65,536", "tokens"]
    assert lines["arena (host)"] == ["1", "GiB", "684", "pages,", "43,776", "tokens"]
    assert lines["weights"] == ["257", "MiB", "bfloat16"]
    assert lines["KV of a token"][:2] == ["22.5", "KiB"]


def test_fingerprints_differ_whenever_bytes_would_mean_something_else() -> None:
    base = settings()
    seen = {
        kv_fingerprint(spec, kv_shape(asked, spec, dtype))
        for spec, asked, dtype in [
            (SMOLLM2, base, torch.bfloat16),
            (SMOLLM2, base, torch.float16),
            (SMOLLM2, settings(quest_sharing="layer"), torch.bfloat16),
            (SMOLLM2, settings(block_tokens=32), torch.bfloat16),
            (dataclasses.replace(SMOLLM2, weights_digest=bytes([1] * 32)), base, torch.bfloat16),
        ]
    }
    assert len(seen) == 5
    assert {len(fingerprint) for fingerprint in seen} == {32}
    again = kv_fingerprint(SMOLLM2, kv_shape(settings(budget_tokens=512), SMOLLM2, torch.bfloat16))
    assert again in seen, "the budget changes no byte"


def test_the_device_sampler_is_counted_on_a_gpu() -> None:
    plan = derive(SMOLLM2, torch.bfloat16, 2**30, torch.device("cuda:0"), max_rows=5)
    tables = DeviceSampler(5, SMOLLM2.vocab_size, CPU).tables
    parts = [getattr(tables, field.name) for field in dataclasses.fields(tables)]
    assert plan.sampling_bytes == sum(part.nbytes for part in parts)
    assert derive(max_rows=5).sampling_bytes == 0
    assert "sampling" in plan.table()
