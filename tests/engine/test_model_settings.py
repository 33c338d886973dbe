"""What the settings mean for a model that chooses by itself: its own sizes, or a clear refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from services.contract.errors import SetupError
from services.contract.layout import ArenaLayout
from services.decoder.engine.assembly import page_hasher
from services.decoder.engine.memory_plan import MemoryPlan, kv_fingerprint, kv_planes, kv_shape
from services.decoder.engine.model_settings import settings_for
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kv.tiered import Tiered
from services.decoder.models.latent_spec import LatentSpec
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints

CPU = torch.device("cpu")
ARENA_BYTES = 16 * 2**20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(
        tmp_path_factory.mktemp("dsa"), "glm_moe_dsa", index_topk_freq=2, index_skip_topk_offset=1
    )


def settings(path: Path, **changes: object) -> DecoderSettings:
    return DecoderSettings.model_validate({"model": path, "device": "cpu"} | changes)


def test_the_models_own_sizes_hold(path: Path) -> None:
    found = settings_for(settings(path, max_rows=3, hot_bytes=2**20), ModelSpec.read(path))
    assert (found.selector, found.block_tokens, found.budget_tokens, found.dense_layers) == ("dsa", 1, 16, 0)
    assert (found.max_rows, found.hot_bytes, found.page_tokens) == (3, 2**20, 64), "what was said stays"


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "another selector": (
        {"selector": "quest"},
        "--selector quest: a glm_moe_dsa model's own indexer chooses",
    ),
    "everything": ({"selector": "everything"}, "--selector everything"),
    "a budget": (
        {"budget_tokens": 32},
        "--budget-tokens 32: .* 16 single tokens in every layer; leave it out",
    ),
    "blocks": ({"block_tokens": 16}, "--block-tokens 16"),
    "dense layers": ({"dense_layers": 2}, "--dense-layers 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_model_does_not_do_is_refused(path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(SetupError, match=message):
        settings_for(settings(path, **changes), ModelSpec.read(path))


def test_records_in_eight_bits_need_latent_ones_in_whole_tiles(path: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"codes 128 latent numbers .* have 32; leave it"):
        settings_for(settings(path, record_dtype="float8"), ModelSpec.read(path))
    for model_type in ("llama", "minimax_m3_vl_text"):
        spec = ModelSpec.read(checkpoints.save(tmp_path / model_type, model_type))
        expected = f"--record-dtype float8: a {model_type} model keeps keys and values, not latent records"
        with pytest.raises(SetupError, match=expected):
            settings_for(settings(tmp_path, record_dtype="float8"), spec)
        settings_for(settings(tmp_path, record_dtype="auto"), spec)
    with pytest.raises(ValidationError, match="record_dtype"):
        settings(path, record_dtype="fp8")


def test_a_model_without_an_indexer_cannot_choose_by_it(tmp_path: Path) -> None:
    spec = ModelSpec.read(checkpoints.save(tmp_path, "llama"))
    with pytest.raises(SetupError, match="--selector dsa: a llama model does not choose"):
        settings_for(settings(tmp_path, selector="dsa"), spec)


CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "first layer shares": ({"indexer_types": ["shared", "full", "full", "full"]}, "its first layer shares"),
    "too few": ({"indexer_types": ["full"] * 3}, "indexer_types must name 4 layers full or shared"),
    "other layers": ({"layer_types": ["full_attention"] * 4}, "only indexed_attention is served"),
    "short index keys": ({"index_head_dim": 8}, "index keys of 8 numbers are shorter than their rope"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_would_be_computed_wrongly_is_refused(path: Path, name: str) -> None:
    changes, message = CONFIGS[name]
    config = ModelSpec.read(path).config
    changed = type(config).from_dict(config.to_dict() | changes)
    with pytest.raises(SetupError, match=message):
        ModelSpec.of_config(changed, path, (), b"")


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_the_plan_counts_what_is_allocated(path: Path, mode: str) -> None:
    """Records of 48 numbers in four layers, index keys of 32 in the two that choose."""
    asked = settings(path, dtype="float32", kv_mode=mode, max_rows=2, max_model_len=256)
    engine = OfflineEngine(asked, ARENA_BYTES)
    plan, shape = engine.plan, engine.plan.shape
    assert (shape.record_elements, shape.block_bytes, shape.groups) == (48, 192, 1)
    assert plan.token_bytes == 4 * 192
    assert plan.index_layers == [0, 2]
    assert engine.runner.index is not None
    assert plan.index_bytes == engine.runner.index.pool.nbytes == 2 * 2 * 256 * 32 * 4
    residence = engine.runner.residence
    pools = sum(residence.pool(layer).nbytes for layer in range(4))
    assert pools == (plan.hot_bytes if mode == "tiered" else plan.resident_bytes)
    if isinstance(residence, Tiered):
        own = [residence.hot.tables[layer] for layer in (0, 2)]
        entries = sum(each.block_to_slot.numel() + 2 * each.order.numel() for each in own)
        entries += own[0].parcels.numel() + own[0].capacity.numel()
        assert plan.table_bytes == 4 * (entries + 2 * 2 * plan.max_pages)
    kv, index = kv_planes(plan.settings, shape)
    assert kv.page_bytes == 64 * plan.token_bytes
    assert index.page_bytes == 2 * 64 * 32 * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_the_plan_counts_records_in_eight_bits(tmp_path: Path, mode: str, dtype: str) -> None:
    """656 bytes of a token and layer, whatever the weights are: on the device, in windows, in the arena."""
    path = checkpoints.save(tmp_path, "glm_moe_dsa", kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=64)
    asked = settings(path, dtype=dtype, record_dtype="float8", kv_mode=mode, max_rows=2, max_model_len=256)
    engine = OfflineEngine(asked, ARENA_BYTES)
    plan, shape, residence = engine.plan, engine.plan.shape, engine.runner.residence
    assert (shape.block_bytes, shape.head_dim, plan.token_bytes) == (656, 576, 4 * 656)
    pools = sum(residence.pool(layer).nbytes for layer in range(4))
    assert pools == (plan.hot_bytes if mode == "tiered" else plan.resident_bytes)
    assert mode == "tiered" or pools == 2 * 256 * 4 * 656
    assert plan.window_bytes == plan.settings.whole_window_tokens * 656
    kv, _ = kv_planes(plan.settings, shape)
    assert kv.page_bytes == 64 * 4 * 656
    assert engine.arena.kv_blocks(3).nbytes == plan.layout.page_count * 64 * 656
    assert re.search(r"KV of a token .*records of 656 bytes in float8: NOT EXACT", plan.table())
    exact = OfflineEngine(settings(path, dtype=dtype, kv_mode=mode, max_model_len=256), ARENA_BYTES)
    assert exact.plan.shape.block_bytes == 576 * exact.model.dtype.itemsize
    assert "NOT EXACT" not in exact.plan.table()


def test_how_records_are_kept_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """And so of the names of pages: nobody finds records of the other kind."""
    spec = ModelSpec.read(checkpoints.save(tmp_path, "deepseek_v32", kv_lora_rank=128))
    fingerprints, hashes = set(), set()
    for record_dtype in ("auto", "float8"):
        asked = settings_for(settings(tmp_path, record_dtype=record_dtype), spec)
        shape = kv_shape(asked, spec, torch.bfloat16)
        fingerprint = kv_fingerprint(spec, shape)
        layout = ArenaLayout.fit(ARENA_BYTES, 64, kv_planes(asked, shape))
        hasher = page_hasher(MemoryPlan.derive(asked, spec, shape, layout, 0, CPU), fingerprint)
        assert hasher is not None
        sequence = Sequence("r", 0, list(range(64)), Sampling(), 0, 1)
        fingerprints.add(fingerprint)
        hashes.update(hasher.extend(sequence, 1))
    assert len(fingerprints) == len(hashes) == 2


def test_anchors_are_those_of_the_published_models() -> None:
    """GLM-5.2: 21 of 78 layers choose. DeepSeek-V3.2 and GLM-5: all."""
    shared = AutoConfig.for_model("glm_moe_dsa", index_topk_freq=4, index_skip_topk_offset=3)
    found = LatentSpec.of(shared)
    assert found is not None
    assert sorted(set(found.anchors)) == [0, 1, *range(2, 78, 4)]
    assert found.anchors[2:8] == (2, 2, 2, 2, 6, 6)
    for model_type, layers in (("glm_moe_dsa", 78), ("deepseek_v32", 61)):
        plain = LatentSpec.of(AutoConfig.for_model(model_type))
        assert plain is not None
        assert plain.anchors == tuple(range(layers))
        assert (plain.latent, plain.roped, plain.index_dim, plain.top_k) == (512, 64, 128, 2048)
    spelled = LatentSpec.of(
        AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=4, index_topk_pattern="FSSF")
    )
    assert spelled is not None
    assert spelled.anchors == (0, 0, 0, 3)


def test_who_follows_whom_is_part_of_the_fingerprint(path: Path) -> None:
    spec = ModelSpec.read(path)
    asked = settings_for(settings(path), spec)
    shape = kv_shape(asked, spec, torch.float32)
    config = type(spec.config).from_dict(spec.config.to_dict() | {"indexer_types": ["full"] * 4})
    other = ModelSpec.of_config(config, path, (), spec.weights_digest)
    assert kv_fingerprint(spec, shape) != kv_fingerprint(other, kv_shape(asked, other, torch.float32))
    layout = ArenaLayout.fit(ARENA_BYTES, 64, kv_planes(asked, shape))
    plan = MemoryPlan.derive(asked, spec, shape, layout, 0, CPU)
    assert plan.top_k == 16
