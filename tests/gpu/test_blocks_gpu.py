"""Models that choose blocks by themselves, on the GPU: `tiered` is `full`, what is chosen the oracle's.

The checkpoints are tiny and random; MiniMax-M3's MLPs are dense, because transformers' experts cannot be
captured in float32. The hot buffer has a slot more than a step reads for each lane of a layer that chooses,
and for a dense layer all there can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints
from tests.decoder.block_rig import ARENA_BYTES, KINDS, engine_of, oracle
from tests.decoder.dsa_rig import ask, check, prompt_of
from tests.decoder.recording import Recording
from tests.decoder.test_blocks import chosen_in
from tests.engine.watch import Watch
from tests.gpu.test_step_gpu import no_synchronisation

pytestmark = pytest.mark.gpu

LENGTHS = (150, 70, 210, 33, 102, 100, 177, 90)
PROMPT = prompt_of(150)
TOKENS = 50
LONGEST = 256
CHANGES: Mapping[str, Mapping[str, object]] = {
    "nsa": {},
    # Enough layers that choose for the dense one to get all that it wants of a tight hot buffer.
    "m3": {
        "num_hidden_layers": 7,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 6,
        "mlp_layer_types": ["dense"] * 7,
    },
}


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("blocks"), KINDS[request.param], **CHANGES[request.param])


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(path), torch.float32, torch.device("cuda:0"))


@pytest.fixture(scope="module")
def rounding(path: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(path), torch.bfloat16, torch.device("cuda:0"))


def engine(model: CausalLM, rows: int = 1, /, device: str = "cuda:0", **changes: object) -> OfflineEngine:
    """On a GPU, whose pools would hold everything if they were not told how little they may."""
    spec, blocks = model.spec, model.spec.blocks
    assert blocks is not None
    base: dict[str, object] = {"device": device, "max_rows": rows, "max_model_len": LONGEST}
    if changes.get("kv_mode") != "full":
        sparse = (spec.layers - blocks.dense_layers) * (blocks.read_blocks + 1)
        slots = blocks.dense_layers * LONGEST // blocks.block_tokens + sparse
        slot_bytes = blocks.block_tokens * 2 * spec.head_dim * model.dtype.itemsize + 8
        base |= {"hot_bytes": rows * spec.kv_heads * slots * slot_bytes}
    return engine_of(model, ARENA_BYTES, tight=True, **(base | changes))


def check_all_ways_agree(model: CausalLM, rows: int, device: str = "cuda:0") -> None:
    """Tiered by graphs is recorded; every other way replays its schedule."""

    def asked() -> list[Sequence]:
        return [ask(str(i), prompt_of(length, i), 24) for i, length in enumerate(LENGTHS[:rows])]

    # Prompts that are soon done, so that all rows decode together and none has another one's slots.
    tiered, ours, recording = engine(model, rows, device, max_step_tokens=512), asked(), Recording()
    recording.attach(tiered, ours)
    tiered.generate(ours)
    check(tiered)
    counters = tiered.counters()[tiered.plan.index_layers].sum(0).tolist()
    chosen, hits, misses = counters[:3]
    print(f"{model.dtype} rows={rows} chosen={chosen} miss_rate={misses / chosen:.3f}")
    assert hits + misses == chosen
    assert misses > 0.2 * chosen, "the hot buffer was too comfortable to prove anything"
    assert len({tuple(one.generated) for one in ours}) == rows
    for changes in (
        {"kv_mode": "full"},
        {"kv_mode": "full", "decode_graphs": False},
        {"decode_graphs": False},
    ):
        other, same = engine(model, rows, device, max_step_tokens=512, **changes), asked()
        recording.replay(other.runner, same)
        assert [one.generated for one in ours] == [one.generated for one in same], changes
        assert chosen == int(other.counters()[other.plan.index_layers][:, Counter.CHOSEN].sum())


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_tiered_equals_full_every_way(model: CausalLM, rows: int) -> None:
    check_all_ways_agree(model, rows)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_tiered_equals_full_every_way_in_bf16(rounding: CausalLM, rows: int) -> None:
    check_all_ways_agree(rounding, rows)


@pytest.mark.parametrize("mode", ["full", "tiered"])
def test_tokens_and_choices_are_the_oracles(model: CausalLM, path: Path, tmp_path: Path, mode: str) -> None:
    """Chunks over windows of history, then 64 tokens far past the budget; the CPU's tokens, too."""
    file = tmp_path / "chosen.sel"
    running = engine(model, kv_mode=mode, decode_graphs=False, record_selections=file)
    one = ask("one", PROMPT, 64)
    running.generate([one])
    check(running)
    logits, expected = oracle(path, [*PROMPT, *one.generated])
    assert logits[149:-1].argmax(1).tolist() == one.generated
    own = chosen_in(file)
    assert len(own) == len(running.plan.index_layers) * 63 * 2
    assert all(set(own[place]) == expected[place] for place in own)
    on_cpu = ask("cpu", PROMPT, 64)
    engine_of(path, kv_mode=mode, max_rows=1).generate([on_cpu])
    assert one.generated == on_cpu.generated


def test_rows_of_any_length_together(model: CausalLM, path: Path) -> None:
    """Shorter than an entry, than a block, than the window; at edges of all of them."""
    asked = [ask(str(length), prompt_of(length, length), 12) for length in (1, 3, 8, 9, 40, 63, 64, 70)]
    running = engine(model, 5)
    running.generate(asked)
    check(running)
    for one in asked:
        logits, _ = oracle(path, [*one.prompt, *one.generated])
        assert logits[len(one.prompt) - 1 : -1].argmax(1).tolist() == one.generated, one.request_id


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_found_prefix_gives_the_same_tokens(model: CausalLM, mode: str) -> None:
    """Of a prompt, and of an answer: the index of both comes back with the records."""
    warm = engine(model, kv_mode=mode)
    first = ask("first", PROMPT, TOKENS)
    warm.generate([first])
    for known in (0, 45):
        again = ask("again", PROMPT, TOKENS)
        again.known = first.generated[:known]
        watch = Watch(warm, again, poison=True)
        warm.generate([again])
        assert again.cached >= 128
        assert watch.loads == 1
        assert again.generated == first.generated
    check(warm)


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_parked_anywhere_and_resumed(model: CausalLM, mode: str) -> None:
    """Inside an entry, a block and a page, and at their edges: tokens, records and index are undisturbed."""
    idle, alone = engine(model, kv_mode=mode), ask("alone", PROMPT, TOKENS)
    undisturbed = Watch(idle, alone)
    idle.generate([alone])
    for after in (2, 43, 44):
        busy = engine(model, kv_mode=mode)
        parked, urgent = ask("parked", PROMPT, TOKENS), ask("urgent", PROMPT[::-1], 20, priority=-1)
        watch = Watch(busy, parked, poison=True)
        busy.scheduler.submit([parked])
        while len(parked.generated) < after:
            busy.step()
        busy.generate([urgent])
        assert busy.scheduler.parkings == watch.loads == 1
        assert parked.generated == alone.generated, after
        found = watch.bytes()
        assert all(torch.equal(mine, other) for mine, other in zip(found, undisturbed.bytes(), strict=True))
        check(busy)


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_decode_step_neither_allocates_nor_waits(rounding: CausalLM, mode: str) -> None:
    """Over 70 steps, so through edges of entries, blocks and pages; no row ends, or others would grow."""
    running = engine(rounding, 3, kv_mode=mode)
    for number in range(3):
        running.scheduler.submit([ask(str(number), prompt_of(100 + 17 * number, number), 110)])
    while running.scheduler.waiting or any(one.is_prefilling for one in running.scheduler.running):
        running.step()
    for _ in range(3):
        running.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        for _ in range(70):
            running.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
