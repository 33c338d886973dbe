"""Models that choose by an indexer of their own, on the GPU: `tiered` is `full`, its choices are the CPU's.

The checkpoints are tiny and random; MLPs are dense, because transformers' experts cannot be captured in
float32. In bf16 records are wide enough for the kernels on tensor cores. The hot buffer has a slot more than
the choice for each row, so that over 20% of the choices miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.record_code import coded_bytes
from services.decoder.kv.prefetch import SideStream
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints, pauses
from tests.decoder.dsa_rig import ARENA_BYTES, CASES, TOP_K, ask, check, engine_of, prompt_of
from tests.decoder.pauses import LENGTHS, PROMPT, check_found_prefix, check_parked_anywhere
from tests.decoder.recording import Recording
from tests.decoder.test_dsa import Choices, Noting, theirs
from tests.gpu.streamed_rig import sleep
from tests.gpu.test_step_gpu import no_synchronisation

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
DENSE: Mapping[str, object] = {"first_k_dense_replace": 9}
WIDE: Mapping[str, object] = {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "index_head_dim": 128}


@pytest.fixture(scope="module", params=["deepseek", "glm shared"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = CASES[request.param]
    return checkpoints.save(tmp_path_factory.mktemp("dsa"), case.model_type, **case.changes, **DENSE)


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(path), torch.float32, CUDA)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """In bf16; layers 0 and 2 choose, 1 and 3 follow them."""
    changes = {"index_topk_freq": 2, "index_skip_topk_offset": 1, **DENSE, **WIDE}
    path = checkpoints.save(tmp_path_factory.mktemp("dsa"), "glm_moe_dsa", **changes)
    return CausalLM(ModelSpec.read(path), torch.bfloat16, CUDA)


def engine(model: CausalLM, rows: int = 1, **changes: object) -> OfflineEngine:
    """On the GPU, whose pools would hold everything if they were not told how little they may."""
    latent = model.spec.latent
    assert latent is not None
    layers, anchors = model.spec.layers, len(set(latent.anchors))
    record_bytes = model.spec.head_dim * model.dtype.itemsize
    if changes.get("record_dtype") == "float8":
        record_bytes = coded_bytes(latent.latent, latent.roped)
    slot_bytes = layers * record_bytes + anchors * 8
    base: dict[str, object] = {"device": "cuda:0", "max_rows": rows, "max_model_len": 512}
    if changes.get("kv_mode", "tiered") == "full":
        base |= {"hot_tokens": 0}
    else:
        base |= {"hot_bytes": rows * (TOP_K + 1) * slot_bytes}
    return engine_of(model, ARENA_BYTES, **(base | changes))


def answers(sequences: list[Sequence]) -> list[list[int]]:
    return [sequence.generated for sequence in sequences]


def check_all_ways_agree(model: CausalLM, rows: int, **common: object) -> None:
    """Tiered by graphs, misses ahead, is recorded; every other way replays its schedule."""

    def asked() -> list[Sequence]:
        return [ask(str(i), prompt_of(length, i), 24) for i, length in enumerate(LENGTHS[:rows])]

    tiered, ours, recording = engine(model, rows, **common), asked(), Recording()
    recording.attach(tiered, ours)
    tiered.generate(ours)
    check(tiered)
    shape = tiered.plan.shape
    choosing = [layer for layer in range(shape.layers) if shape.chooses(layer)]
    chosen, hits, misses = tiered.counters()[choosing][:, :3].sum(0).tolist()
    print(f"{model.dtype} rows={rows} chosen={chosen} miss_rate={misses / chosen:.3f}")
    assert hits + misses == chosen
    assert misses > 0.2 * chosen, "the hot buffer was too comfortable to prove anything"
    for changes in (
        {"kv_mode": "full"},
        {"kv_mode": "full", "decode_graphs": False},
        {"decode_graphs": False},
        {"prefetch": False},
        {"prefetch": False, "decode_graphs": False},
    ):
        other, same = engine(model, rows, **common, **changes), asked()
        recording.replay(other.runner, same)
        assert answers(ours) == answers(same), changes
        assert chosen == int(other.counters()[:, Counter.CHOSEN].sum())


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_tiered_equals_full_every_way(model: CausalLM, rows: int) -> None:
    check_all_ways_agree(model, rows)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_tiered_equals_full_every_way_in_bf16(shared: CausalLM, rows: int) -> None:
    check_all_ways_agree(shared, rows)


def test_tiered_equals_full_with_index_keys_in_eight_bits(shared: CausalLM, model: CausalLM) -> None:
    for one in (shared, model):
        check_all_ways_agree(one, 3, index_dtype="float8")


@pytest.mark.parametrize("index_dtype", ["auto", "float8"])
def test_tiered_equals_full_with_records_in_eight_bits(shared: CausalLM, index_dtype: str) -> None:
    check_all_ways_agree(shared, 3, record_dtype="float8", index_dtype=index_dtype)


def test_records_in_eight_bits_are_parked_and_resumed(shared: CausalLM) -> None:
    pauses.check_parked_anywhere(lambda: engine(shared, record_dtype="float8"), (1, 43, 44), ahead=True)


@pytest.mark.parametrize("mode", ["full", "tiered"])
def test_choices_are_the_cpus_and_tokens_transformers(model: CausalLM, path: Path, mode: str) -> None:
    """Every layer and position, through windows of prefill and far past the budget."""
    expected, chosen = theirs(path, PROMPT, 64)
    noted: dict[str, Choices] = {"cpu": {}, "cuda": {}}

    def noting(place: str) -> Callable[..., Noting]:
        return lambda layer, own: Noting(layer, own, noted[place])

    hot = {"kv_mode": mode, "max_rows": 1, "hot_tokens": 0 if mode == "full" else TOP_K + 1}
    at_home = CausalLM(ModelSpec.read(path), torch.float32, CPU)
    on_cpu = engine_of(at_home, ARENA_BYTES, noting("cpu"), **hot, device="cpu")
    on_gpu = engine_of(
        model, ARENA_BYTES, noting("cuda"), **hot, device="cuda:0", decode_graphs=False, hot_bytes=2**20
    )
    for choices in noted.values():
        choices.clear()  # of what warmed up
    for one in (on_cpu, on_gpu):
        one.generate([sequence := ask("one", PROMPT, 64)])
        assert sequence.generated == expected
        check(one)
    assert noted["cuda"].keys() == noted["cpu"].keys() == chosen.keys()
    for place, tokens in noted["cpu"].items():
        assert noted["cuda"][place] == tokens == chosen[place], place


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_found_prefix_gives_the_same_tokens(model: CausalLM, mode: str) -> None:
    check_found_prefix(engine(model, kv_mode=mode))


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_parked_anywhere_and_resumed(model: CausalLM, mode: str) -> None:
    check_parked_anywhere(partial(engine, model, kv_mode=mode), (1, 43, 44), ahead=True)


@pytest.fixture
def slow_side(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fetches ahead of their turn come 100 ms late; their plans stay, though nobody waits for them."""
    start = SideStream.start
    kept: list[object] = []

    def late(self: SideStream, work: Mapping[int, Callable[[], None]]) -> None:
        kept.append(work)

        def after_a_while(fetch: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                sleep()
                fetch()

            return run

        start(self, {layer: after_a_while(fetch) for layer, fetch in work.items()})

    monkeypatch.setattr(SideStream, "start", late)
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [True, False], ids=["in order", "without waiting"])
@pytest.mark.usefixtures("slow_side")
def test_a_layer_waits_for_its_own_misses(
    shared: CausalLM, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """However late they come; where nobody waits the tokens are wrong, or this proved nothing."""
    full = ask("full", PROMPT, 12)
    engine(shared, kv_mode="full", decode_graphs=False).generate([full])
    tiered = engine(shared, decode_graphs=False)
    if not waits:
        monkeypatch.setattr(SideStream, "wait", lambda self, layer: None)
    one = ask("one", PROMPT, 12)
    tiered.generate([one])
    torch.cuda.synchronize()
    assert (one.generated == full.generated) == waits


@pytest.mark.parametrize("prefetch", [True, False], ids=["ahead", "in turn"])
@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_decode_step_neither_allocates_nor_waits(shared: CausalLM, mode: str, prefetch: bool) -> None:
    """Over 130 steps, so through edges of pages."""
    running = engine(shared, 3, kv_mode=mode, prefetch=prefetch)
    for number in range(3):
        running.scheduler.submit([ask(str(number), prompt_of(100 + 17 * number, number), 200)])
    while running.scheduler.waiting or any(one.is_prefilling for one in running.scheduler.running):
        running.step()
    for _ in range(3):
        running.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        for _ in range(130):
            running.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
