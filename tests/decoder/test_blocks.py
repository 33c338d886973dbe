"""Models that choose blocks by themselves answer and choose as their definition does: NSA and MiniMax-M3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from services.contract.errors import SetupError
from services.decoder.attention.selection_file import read_frames
from services.decoder.engine.memory_plan import MemoryPlan
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.gpu.block_kernels import GpuBlockKernels
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.decoder.block_rig import KINDS, engine_of, oracle
from tests.decoder.dsa_rig import ask, check, prompt_of
from tests.decoder.plain_lru import PlainLane

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("blocks"), KINDS[request.param])


def chosen_in(file: Path) -> dict[tuple[int, int, int], list[int]]:
    """What an engine's recorder noted of row 0, by layer, position and KV head, in order."""
    return {
        (frame.layer, int(frame.positions[0]), group): [block for block in blocks if block >= 0]
        for frame in read_frames(file)
        for group, blocks in enumerate(frame.blocks[0].tolist())
    }


@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.slow), "tiered"])
def test_tokens_and_choices_are_the_oracles(path: Path, tmp_path: Path, mode: str) -> None:
    """Chunks over windows of history, then 64 tokens far past the budget: every layer, step and KV head."""
    file = tmp_path / "chosen.sel"
    engine = engine_of(path, kv_mode=mode, max_rows=1, record_selections=file)
    one = Sequence("one", 0, prompt_of(150), Sampling(logprobs=True), 0, 64)
    engine.generate([one])
    check(engine)
    logits, expected = oracle(path, [*one.prompt, *one.generated])
    assert logits[149:-1].argmax(1).tolist() == one.generated
    assert len(set(one.generated)) > 8, "an answer that says one thing proves nothing"
    own = chosen_in(file)
    layers = engine.plan.index_layers
    assert own.keys() == {
        (layer, at, group) for layer in layers for at in range(150, 213) for group in (0, 1)
    }
    assert all(set(own[place]) == expected[place] for place in own)
    assert len({frozenset(blocks) for blocks in own.values()}) > 50, "everybody chose alike"


def test_rows_of_any_length_together(path: Path) -> None:
    """Shorter than an entry, than a block, than the window; at edges of all of them."""
    asked = [ask(str(length), prompt_of(length, length), 12) for length in (1, 3, 8, 9, 40, 63, 64, 70)]
    engine = engine_of(path, max_rows=4)
    engine.generate(asked)
    check(engine)
    for one in asked:
        logits, _ = oracle(path, [*one.prompt, *one.generated])
        assert logits[len(one.prompt) - 1 : -1].argmax(1).tolist() == one.generated, one.request_id


def test_blocks_of_64_are_counted_by_head(tmp_path: Path) -> None:
    """NSA's own sizes: counters are those of a plain LRU, fed by the oracle's choices and the window."""
    sizes: Mapping[str, int] = {
        "nsa_block_tokens": 64,
        "nsa_top_k": 3,
        "nsa_compress_tokens": 16,
        "nsa_window_tokens": 100,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
    }
    path, file = checkpoints.save(tmp_path, "nsa", **sizes), tmp_path / "chosen.sel"
    engine = engine_of(path, max_rows=1, max_step_tokens=512, window_tokens=512, record_selections=file)
    [hot] = engine.plan.hot_classes
    one = ask("one", prompt_of(600), 60)
    engine.generate([one])
    _, chosen = oracle(path, [*one.prompt, *one.generated])
    noted = chosen_in(file)
    for layer in range(2):
        hits = misses = 0
        for group in range(2):
            lane = PlainLane(list(range(hot.floor * hot.parcel_slots)))
            lane.step([], 599 // 64)  # seated with its open block
            for at in range(600, 659):
                own = noted[layer, at, group]
                assert set(own) == chosen[layer, at, group]
                window = [block for block in range(at // 64, (at - 99) // 64 - 1, -1) if block not in own]
                _, _, fetched, found, _ = lane.step([*own, *window], at // 64)
                hits, misses = hits + found, misses + len(fetched)
        counters = engine.counters()[layer]
        assert [int(counters[each]) for each in (Counter.HITS, Counter.MISSES)] == [hits, misses]
        assert counters[Counter.CHOSEN] == hits + misses
        assert counters[Counter.FETCHED_BYTES] == misses * 64 * 2 * 16 * 4
        assert misses > 20


def test_their_settings_are_their_own(path: Path) -> None:
    plan = engine_of(path).plan
    blocks = ModelSpec.read(path).blocks
    assert blocks is not None
    assert (plan.settings.selector, plan.shape.block_tokens) == (blocks.selector, 8)
    assert plan.sparse_layers == plan.shape.layers - blocks.dense_layers == len(plan.index_layers) == 3
    for name, value in (
        ("selector", "quest"),
        ("block_tokens", 16),
        ("budget_tokens", 96),
        ("dense_layers", 2),
    ):
        with pytest.raises(
            SetupError,
            match=rf"--{name.replace('_', '-')} {value}: a \w+ model itself chooses, \d blocks of 8",
        ):
            engine_of(path, tight=False, **{name: value})


def test_pages_are_multiples_of_their_blocks(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, "minimax_m3_vl_text", index_block_size=128)
    assert engine_of(path, tight=False, max_step_tokens=256).plan.shape.page_tokens == 128
    with pytest.raises(SetupError, match="multiples of block_tokens"):
        engine_of(path, tight=False, max_step_tokens=256, page_tokens=192)


def test_others_do_not_choose_so(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, "llama")
    from services.decoder.engine.model_settings import settings_for

    for selector in ("nsa", "block_index", "dsa"):
        settings = DecoderSettings.model_validate({"model": path, "selector": selector})
        with pytest.raises(SetupError, match=f"--selector {selector}: a llama model does not choose"):
            settings_for(settings, ModelSpec.read(path))


def test_a_gpu_plans_the_room_for_scores(path: Path) -> None:
    plan = engine_of(path).plan
    cuda, cpu = torch.device("cuda:0"), torch.device("cpu")
    planned = MemoryPlan.derive(plan.settings, ModelSpec.read(path), plan.shape, plan.layout, 0, cuda)
    kernels = GpuBlockKernels(plan.settings.max_rows, plan.max_blocks, plan.shape.groups, cpu)
    rest = planned.score_bytes - kernels._scores.nbytes
    assert kernels._scores.nbytes > 0
    if plan.settings.selector == "nsa":  # the entries of every row's pages, and what is made of them
        entries = torch.zeros(plan.settings.max_rows * plan.max_pages, plan.shape.index_elements)
        assert rest > entries.nbytes * 2
    else:
        assert rest == 0
    assert plan.score_bytes == 0


MISFITS: Mapping[str, tuple[str, Mapping[str, object], str]] = {
    "entries that do not divide": ("nsa", {"nsa_compress_tokens": 3}, "must divide nsa_block_tokens"),
    "no window": ("nsa", {"nsa_window_tokens": 0}, "be positive"),
    "index heads": ("minimax_m3_vl_text", {"index_n_heads": 3}, "3 index heads for 2 KV heads"),
    "local blocks": ("minimax_m3_vl_text", {"index_local_blocks": 2}, "index_local_blocks is 2"),
    "dense in between": (
        "minimax_m3_vl_text",
        {"layer_types": ["minimax_m3_sparse", "full_attention"] * 2},
        "must be full_attention first, then minimax_m3_sparse",
    ),
    "all dense": ("minimax_m3_vl_text", {"layer_types": ["full_attention"] * 4}, "none of its layers"),
    "compressed entries": ("llama", {"model_type": "deepseek_v4"}, "compressed entries, half-made ones"),
    "pictures": ("llama", {"model_type": "minimax_m3_vl"}, "text only; save its language model by itself"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, name: str) -> None:
    from tests.decoder.test_models import change_config

    kind, changes, message = MISFITS[name]
    path = checkpoints.save(tmp_path, kind)
    change_config(**changes)(path)
    with pytest.raises(SetupError, match=message):
        ModelSpec.read(path)
