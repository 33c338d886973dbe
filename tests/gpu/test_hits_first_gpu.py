"""Hits first on the GPU: halves against the twins, late misses, and whole engines with it and without.

Wherever a launch must not look - tokens past the length, slots of the other half - lie NaNs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sequence
from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.latent_kernels import GpuLatentKernels
from services.decoder.kernels.gpu.step_kernels import GpuKernels
from services.decoder.kv.prefetch import SideStream
from services.decoder.models.bundled.directory import default_model
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints
from tests.decoder.dsa_rig import CASES, ask, check, prompt_of
from tests.gpu import test_attend_gpu, test_attend_latent_gpu
from tests.gpu.streamed_rig import LONG, sleep
from tests.gpu.test_dsa_gpu import DENSE, WIDE
from tests.gpu.test_dsa_gpu import engine as dsa_engine
from tests.gpu.test_exact_gpu import engine as quest_engine
from tests.gpu.test_exact_gpu import requests
from tests.gpu.test_step_gpu import no_synchronisation

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
SHARES = {"no hits": 0.0, "some": 0.7, "no misses": 1.0, "by lane": -1.0}
ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1.2e-3}  # twice what one launch rounds


def halves(selected: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """`share` of the places are hits; below 0, all of every other lane's."""
    chance = torch.rand(selected.shape, generator=torch.Generator().manual_seed(4))
    is_hit = chance < share
    if share < 0:
        is_hit = (torch.arange(selected.shape[0]) % 2 == 0).unsqueeze(1).expand_as(chance)
    return selected.masked_fill(~is_hit, -1), selected.masked_fill(is_hit, -1)


def batch_of(length: Tensor, rows: int, groups: int, block_tokens: int) -> DecodeBatch:
    """`length` [real rows]; padding follows."""
    nowhere = torch.zeros(rows, 1, dtype=torch.int32, device="cuda")
    padded = torch.full((rows,), -1, dtype=torch.int32)
    padded[: length.shape[0]] = length
    seats = torch.arange(rows, dtype=torch.int32, device="cuda")
    real = torch.tensor([length.shape[0]], dtype=torch.int32, device="cuda")
    return DecodeBatch(seats, padded.cuda(), real, nowhere, nowhere, groups, block_tokens, 1, 1)


def check_halves(
    kernels: GpuKernels,
    attend: Callable[[Tensor, Tensor, bool], Part],
    pool: Tensor,
    slots: Tensor,
    selected: Tensor,
    expected: Tensor,
    share: float,
) -> None:
    """`attend` over a pool and a half; the misses lie there from the second launch on."""
    hits, misses = halves(selected, share)
    before = pool.clone()
    before[slots[misses >= 0].long().cuda()] = float("nan")
    first = attend(before, hits.cuda(), False)
    second = attend(pool, misses.cuda(), True)
    out = kernels.merge_parts(first, second, first.out.dtype).out[: expected.shape[0]]
    assert (out.double() - expected).norm() / expected.norm() < ERROR[out.dtype]


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("case", test_attend_gpu.CASES, ids=str)
def test_halves_of_blocks_merge_into_the_whole(case: test_attend_gpu.Case, share: float) -> None:
    rig = test_attend_gpu.Rig(case)
    rows = case.rows + test_attend_gpu.PADDING
    kernels = GpuKernels(rows, case.groups * case.heads, CUDA)
    batch, slots = batch_of(rig.length, rows, case.groups, case.block_tokens), rig.slots.cuda()

    def attend(pool: Tensor, half: Tensor, joined: bool) -> Part:
        scaling = case.head_dim**-0.5
        return kernels.attend_half(batch, rig.query, pool, slots, half, scaling, joined=joined)

    check_halves(kernels, attend, rig.pool, rig.slots, rig.selected, rig.expected(), share)


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("case", test_attend_latent_gpu.CASES, ids=str)
def test_halves_of_latent_records_merge_into_the_whole(
    case: test_attend_latent_gpu.Case, share: float
) -> None:
    rig = test_attend_latent_gpu.Rig(case)
    rows, latent = case.rows + test_attend_latent_gpu.PADDING, test_attend_latent_gpu.LATENT
    kernels, latent_kernels = GpuKernels(rows, 1, CUDA), GpuLatentKernels(rows, 4096, case.heads, CUDA)
    batch, slots = batch_of(rig.length, rows, 1, case.shape.block_tokens), rig.slots.cuda()

    def attend(pool: Tensor, half: Tensor, joined: bool) -> Part:
        sizes = (192**-0.5, latent)
        return latent_kernels.attend_half(batch, rig.query, pool, slots, half, *sizes, joined=joined)

    check_halves(kernels, attend, rig.pool, rig.slots, rig.selected, rig.expected(), share)


@pytest.fixture(scope="module", params=["deepseek", "glm shared"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """An indexer's, in float32."""
    case = CASES[request.param]
    path = checkpoints.save(tmp_path_factory.mktemp("dsa"), case.model_type, **case.changes, **DENSE)
    return CausalLM(ModelSpec.read(path), torch.float32, CUDA)


@pytest.fixture(scope="module")
def grouped() -> CausalLM:
    """Quest's, the bundled model in float32."""
    return CausalLM(ModelSpec.read(default_model()), torch.float32, CUDA, dense=dense_ops(CUDA))


def answers(engine: OfflineEngine, asked: list[Sequence]) -> list[list[int]]:
    """Greedy ones."""
    engine.generate(asked)
    check(engine)
    return [one.generated for one in asked]


def made_up(rows: int) -> list[Sequence]:
    """For a tiny model."""
    lengths = (150, 70, 210, 133, 102, 100, 177, 90)[:rows]
    return [ask(str(i), prompt_of(length, i), 24) for i, length in enumerate(lengths)]


def prose(rows: int) -> list[Sequence]:
    """For the bundled one."""
    return requests(default_model(), (1500, 700, 2100, 333, 1024, 64, 1777, 900)[:rows], 40)


WAYS: Mapping[str, Mapping[str, object]] = {
    "graphs": {},
    "launches": {"decode_graphs": False},
    "graphs, followers in turn": {"prefetch": False},
}


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("way", WAYS)
def test_answers_of_an_indexers_model_are_the_usual_ones(tiny: CausalLM, way: str, rows: int) -> None:
    """In float32, where the order of sums decides no token."""
    check_answers(lambda **changes: dsa_engine(tiny, rows, **changes), way, lambda: made_up(rows))


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("way", ["graphs", "launches"])
def test_answers_of_quests_model_are_the_usual_ones(grouped: CausalLM, way: str, rows: int) -> None:
    check_answers(lambda **changes: quest_engine(grouped, rows, **changes), way, lambda: prose(rows))


def check_answers(
    engine: Callable[..., OfflineEngine], way: str, asked: Callable[[], list[Sequence]]
) -> None:
    usual, first = engine(), engine(hits_first=True, **WAYS[way])
    assert answers(usual, asked()) == answers(first, asked())
    counted, ours = usual.counters(), first.counters()
    assert torch.equal(counted[:, : Counter.NANOSECONDS], ours[:, : Counter.NANOSECONDS])
    assert int(ours[:, Counter.MISSES].sum()) > 0.2 * int(ours[:, Counter.CHOSEN].sum())
    assert not ours[:, Counter.NANOSECONDS].any(), "nobody is known to wait"


@pytest.fixture
def slow_side(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Misses come 10 ms late, layer by layer; their plans stay, though nobody waits for them."""
    start = SideStream.start
    kept: list[object] = []

    def late(self: SideStream, work: Mapping[int, Callable[[], None]]) -> None:
        kept.append(work)

        def after_a_while(fetch: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                sleep(LONG // 10)
                fetch()

            return run

        start(self, {layer: after_a_while(fetch) for layer, fetch in work.items()})

    monkeypatch.setattr(SideStream, "start", late)
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [True, False], ids=["in order", "without waiting"])
@pytest.mark.usefixtures("slow_side")
def test_misses_are_waited_for(grouped: CausalLM, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """However late they come; where nobody waits the tokens are wrong, or this proved nothing."""
    usual = answers(quest_engine(grouped, 1, decode_graphs=False), prose(1))
    first = quest_engine(grouped, 1, hits_first=True, decode_graphs=False)
    if not waits:
        monkeypatch.setattr(SideStream, "wait", lambda self, layer: None)
    assert (answers(first, prose(1)) == usual) == waits


def running(engine: OfflineEngine) -> OfflineEngine:
    """Three rows that all decode."""
    for number in range(3):
        engine.scheduler.submit([ask(str(number), prompt_of(100 + 17 * number, number), 200)])
    while engine.scheduler.waiting or any(one.is_prefilling for one in engine.scheduler.running):
        engine.step()
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.parametrize("kind", ["quest", "dsa"])
def test_a_decode_step_neither_allocates_nor_waits(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In bf16, so by the kernels on tensor cores."""
    if kind == "quest":
        spec = ModelSpec.read(default_model())
        model = CausalLM(spec, torch.bfloat16, CUDA, dense=dense_ops(CUDA))
        engine = running(quest_engine(model, 3, hits_first=True))
    else:
        changes = {"index_topk_freq": 2, "index_skip_topk_offset": 1, **DENSE, **WIDE}
        path = checkpoints.save(tmp_path_factory.mktemp("dsa"), "glm_moe_dsa", **changes)
        model = CausalLM(ModelSpec.read(path), torch.bfloat16, CUDA)
        engine = running(dsa_engine(model, 3, hits_first=True))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        for _ in range(130):
            engine.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
