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
from services.decoder.kv.arena_path import DirectPath
from services.decoder.kv.bounds_index import BoundsIndex
from services.decoder.kv.full import Full
from services.decoder.kv.history import Window
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.hot_class import HotClass
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
    room_bytes: int | None = None,
    **changes: object,
) -> MemoryPlan:
    asked = settings(**changes)
    shape = kv_shape(asked, spec, dtype)
    layout = ArenaLayout.fit(arena_bytes, shape.page_tokens, kv_planes(asked, shape))
    return MemoryPlan.derive(asked, spec, shape, layout, WEIGHTS, device, room_bytes)


def test_smollm2_by_hand() -> None:
    plan = derive()
    # A record is a key and a value of one head, 2 x 64 x 2 bytes; a block 16; eight rows 2 x 2,048 tokens
    # each, of which one can have all, up to its 8,192 tokens, and each at least the budget of 128 blocks and
    # one more.
    assert plan.shape.block_bytes == 16 * 2 * 64 * 2 == 4096
    assert plan.max_model_len == 8192
    assert plan.hot_classes == (HotClass(layers=30, parcels=8 * 32, parcel_slots=8, floor=17, most=64),)
    assert plan.top_k == 128
    assert plan.hot_bytes == 8 * 3 * 256 * 30 * 4096 == 754_974_720
    assert plan.resident_bytes == 0
    assert plan.device_pages == 8 * 128
    # Bounds of a page: 4 blocks x 3 heads x 2 x 64 x 2 bytes.
    assert plan.index_bytes == 30 * 1024 * 3072 == 94_371_840
    assert plan.token_bytes == 30 * 3 * 2 * 64 * 2 == 23_040
    assert (plan.max_pages, plan.max_blocks) == (128, 512)
    rows, lanes, slots = 8 * (2 * 128 + 64 + 1), 24 * 30 * 512, 2 * 30 * 3 * 8 * 256
    assert plan.table_bytes == 4 * (rows + lanes + slots) == 2_959_392
    assert plan.layout.page_count == 684
    assert plan.window_bytes == 16_384 * 768  # a record of each head in one layer


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
        hot = HotBuffer(shape, rows, plan.max_blocks, plan.hot_classes, CPU)
        assert plan.hot_bytes == sum(pool.nbytes for pool in hot.pools) > 0
        for lanes in hot.tables:
            table_bytes += sum(t.nbytes for t in (lanes.block_to_slot, lanes.slot_to_block, lanes.order))
        for lanes in {id(lanes.parcels): lanes for lanes in hot.tables}.values():
            table_bytes += lanes.parcels.nbytes + lanes.capacity.nbytes
        assert plan.resident_bytes == 0
    else:
        path, window = DirectPath(Twins(), arena, shape, 64, CPU), Window(Twins(), shape, 64, CPU)
        full = Full(Twins(), arena, shape, plan.device_pages, tables, path, window)
        assert plan.resident_bytes == sum(full.pool(layer).nbytes for layer in range(shape.layers))
        assert plan.hot_bytes == 0
    assert plan.table_bytes == table_bytes
    assert plan.sparse_layers == (3 - dense if selector == "quest" else 0)
    if plan.sparse_layers:
        index = BoundsIndex(Twins(), arena, shape, plan.device_pages, plan.sparse_layers, CPU)
        assert plan.index_bytes == index.pool.nbytes
        assert index.layer(2).device.data_ptr() == index.pool[-1].data_ptr()
    else:
        assert plan.index_bytes == 0
    layers = [each.layers for each in plan.hot_classes]
    if mode == "full":
        assert not layers
    else:
        assert layers == [count for count in (3 - plan.sparse_layers, plan.sparse_layers) if count]
        lane_slots = [each.parcels * each.parcel_slots for each in plan.hot_classes]
        assert lane_slots == [2 * 32] * (plan.sparse_layers < 3) + [2 * 8] * (plan.sparse_layers > 0)


def test_rows_of_the_longest_length_all_fit_the_device_cache_by_default() -> None:
    plan = derive(max_model_len=65, max_rows=8)
    assert plan.max_pages == 2
    assert plan.device_pages == 16


def test_a_small_arena_shortens_what_one_may_ask() -> None:
    plan = derive(arena_bytes=32 * 2**20)
    assert plan.max_model_len == plan.layout.page_count * 64 < 8192


def test_no_row_is_given_more_than_the_longest_one_can_use() -> None:
    (quest,) = derive(max_model_len=640, budget_tokens=1024).hot_classes
    assert (quest.lane_slots, quest.floor * quest.parcel_slots) == (40, 40)
    assert quest.parcels == 8 * quest.most


def quest_lane_slots(plan: MemoryPlan) -> int:
    """Blocks of all rows together."""
    return plan.hot_classes[-1].parcels * plan.hot_classes[-1].parcel_slots


def test_hot_bytes_buys_as_many_slots_as_fit_with_their_tables() -> None:
    block = 30 * 3 * (4096 + 8)
    for blocks in (136, 143, 144, 1000):
        plan = derive(hot_bytes=blocks * block)
        assert quest_lane_slots(plan) == blocks // 8 * 8
        assert plan.hot_bytes <= blocks * block
    with pytest.raises(
        SetupError, match=r"may take 47\.6 MiB in 30 layers, and one row needs 47\.9 MiB there"
    ):
        derive(hot_bytes=135 * block)
    assert quest_lane_slots(derive(hot_bytes=2**40)) == 8 * 512, "more than all rows can ever use"
    floor = derive(hot_bytes=2**28, hot_tokens=4096).hot_classes[-1]
    assert floor.floor * floor.parcel_slots == 256


def test_a_gpu_gives_what_is_free_after_index_tables_and_sampling() -> None:
    cuda = torch.device("cuda:0")
    without = derive(device=cuda, hot_bytes=2**40, max_rows=64)
    plan = derive(device=cuda, room_bytes=3 * 2**30, max_rows=64)
    assert quest_lane_slots(plan) < quest_lane_slots(without)
    spent = plan.hot_bytes + plan.index_bytes + plan.table_bytes + plan.sampling_bytes + plan.window_bytes
    # Less than a parcel is left over, and the table of parcels that was counted twice or not at all.
    assert 0 <= 3 * 2**30 - spent < 8 * 30 * 3 * 4104 + 4 * 64 * 65
    assert derive(device=cuda, room_bytes=2**30, hot_bytes=2**28).hot_bytes <= 2**28, "what was asked"
    with pytest.raises(SetupError, match=r"raise --hot-bytes or --device-memory-share"):
        derive(device=cuda, room_bytes=2**20)


def test_layers_that_read_everything_hold_all_rows_where_nothing_limits_them() -> None:
    dense = derive(dense_layers=2).hot_classes[0]
    assert (dense.layers, dense.parcels, dense.floor) == (2, 8 * dense.most, dense.most)
    assert dense.lane_slots == 512
    row = 2 * 3 * 512 * 4104
    dense, _quest = derive(dense_layers=2, hot_bytes=2**28).hot_classes
    assert dense.parcels == 8 * dense.most
    assert (
        quest_lane_slots(derive(dense_layers=2, hot_bytes=2**28))
        == (2**28 - 8 * row) // (28 * 3 * 4104) // 8 * 8
    )
    dense = derive(dense_layers=2, hot_bytes=2**27).hot_classes[0]
    assert dense.parcels * 16 == 2**26 // (2 * 3 * 4104) // 16 * 16
    with pytest.raises(SetupError, match="lower --max-model-len"):
        derive(selector="everything", hot_bytes=30 * row // 4)


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
        derive(SMOLLM2, torch.bfloat16, arena_bytes, CPU, None, **changes)


def test_a_window_is_whole_pages() -> None:
    assert settings(window_tokens=1000, page_tokens=192).whole_window_tokens == 960
    assert settings(window_tokens=64, page_tokens=192).whole_window_tokens == 192


def test_a_step_holds_all_rows_and_a_block() -> None:
    assert [settings().step_tokens(kind) for kind in ("cpu", "cuda")] == [512, 4096]
    assert settings(max_rows=1024).step_tokens("cpu") == 1024 + 16
    assert settings(max_step_tokens=100).step_tokens("cuda") == 100


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
    assert lines["hot buffer"] == ["720", "MiB", "32,768", "tokens;", "a", "row", "2,176", "to", "8,192"]
    assert lines["selector's index"] == ["90", "MiB", "65,536", "tokens"]
    assert lines["arena (host)"] == ["1", "GiB", "684", "pages,", "43,776", "tokens"]
    assert lines["weights"] == ["257", "MiB", "bfloat16"]
    assert lines["KV of a token"][:2] == ["22.5", "KiB"]
    assert set(lines) == {
        *("weights", "hot buffer", "selector's index", "tables", "prefill windows", "arena (host)"),
        "KV of a token",
    }, "what is nothing is left out"
    full = derive(kv_mode="full").table()
    assert "resident KV" in full
    assert "hot buffer" not in full


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
    assert "sampling" not in derive(max_rows=5).table()


def test_full_mode_is_held_against_the_devices_memory() -> None:
    """8 rows of 8,192 tokens are 1.41 GiB of KV, and what else is on the device comes first."""
    cuda = torch.device("cuda:0")
    plan = derive(kv_mode="full", device=cuda, room_bytes=2 * 2**30)
    assert plan.resident_bytes == 65_536 * 23_040
    beside = plan.index_bytes + plan.table_bytes + plan.window_bytes + plan.sampling_bytes
    exact = plan.resident_bytes + beside
    assert derive(kv_mode="full", device=cuda, room_bytes=exact) == plan
    message = r"KV of 65,536 tokens takes 1.41 GiB .* left for it; lower --device-cache-tokens .* 8192 tokens"
    with pytest.raises(SetupError, match=message):
        derive(kv_mode="full", device=cuda, room_bytes=exact - 1)
    small = derive(kv_mode="full", device=cuda, room_bytes=exact - 1, device_cache_tokens=60_000)
    assert small.resident_bytes < plan.resident_bytes


def test_a_hot_buffer_that_was_asked_for_is_held_against_the_devices_memory() -> None:
    cuda = torch.device("cuda:0")
    wanted = derive(device=cuda, room_bytes=2**33, hot_bytes=2**29)
    assert 0.9 * 2**29 < wanted.hot_bytes <= 2**29
    with pytest.raises(SetupError, match=r"--hot-bytes 536870912: .* take 510 MiB, .* left for it; leave"):
        derive(device=cuda, room_bytes=2**29, hot_bytes=2**29)


def test_a_lane_is_no_longer_than_the_device_can_order() -> None:
    def most(lane_slots: int) -> int:
        asked = settings(max_rows=2)
        shape = kv_shape(asked, SMOLLM2, torch.bfloat16)
        layout = ArenaLayout.fit(2**30, shape.page_tokens, kv_planes(asked, shape))
        plan = MemoryPlan.derive(asked, SMOLLM2, shape, layout, WEIGHTS, CPU, 2**33, lane_slots)
        return plan.hot_classes[0].lane_slots

    assert most(512) == most(32_768) == 512, "a row's blocks"
    assert most(200) == 200
    assert most(8) == 136, "the floor must be possible"
