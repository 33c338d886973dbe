"""Layers that follow another one: no index, no tables, the anchor's plan again - and the right one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch

from services.decoder.engine.offline import OfflineEngine
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.step_kernels import MissPlan, Placement
from services.decoder.kv.prefetch import AtOnce
from services.decoder.kv.tiered import Tiered
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from tests.decoder import checkpoints
from tests.decoder.dsa_rig import ask, check, engine_of, prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")

Fetch = partial[None]
PROMPT = prompt_of(120)
TOKENS = 24


def idle() -> None:
    """A fetch that is left out."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """Layers 0 and 2 choose, 1 and 3 follow them."""
    path = checkpoints.save(
        tmp_path_factory.mktemp("dsa"), "glm_moe_dsa", index_topk_freq=2, index_skip_topk_offset=1
    )
    return CausalLM(ModelSpec.read(path), torch.float32, torch.device("cpu"))


def answer(engine: OfflineEngine) -> list[int]:
    one = ask("one", PROMPT, TOKENS)
    engine.generate([one])
    check(engine)
    return one.generated


@pytest.fixture(scope="module")
def expected(model: CausalLM) -> list[int]:
    """Of `full`, where nothing is replayed."""
    return answer(engine_of(model, kv_mode="full", hot_tokens=0))


def test_followers_have_no_index_and_no_tables(model: CausalLM, expected: list[int]) -> None:
    engine = engine_of(model, max_rows=1)
    tiered, index = engine.runner.residence, engine.runner.index
    assert isinstance(tiered, Tiered)
    assert index is not None
    assert answer(engine) == expected
    tables, pools = tiered.hot.tables, tiered.hot.pools
    for anchor, follower in ((0, 1), (2, 3)):
        assert tables[anchor].order.data_ptr() == tables[follower].order.data_ptr()
        assert pools[anchor].data_ptr() != pools[follower].data_ptr()
    assert tables[0].order.data_ptr() != tables[2].order.data_ptr()
    assert index.pool.shape[0] == 2
    assert [layer.page_bytes for layer in engine.arena.layout.planes[1].layers] == [64 * 32 * 4, 0] * 2
    counters = engine.counters()
    assert (counters[:, Counter.MISSES] > 0).all()
    assert torch.equal(counters[0::2, Counter.MISSES], counters[1::2, Counter.MISSES])
    assert torch.equal(counters[0::2, Counter.FETCHED_BYTES], counters[1::2, Counter.FETCHED_BYTES])
    assert (counters[1::2, Counter.CHOSEN] == 0).all(), "the anchors' to count"


def test_rows_that_shrink_and_grow_keep_followers_in_step(model: CausalLM, expected: list[int]) -> None:
    """One row has all slots of three, gives most up to two others, and gets some back."""
    engine = engine_of(model, max_rows=3, hot_tokens=40)
    first = ask("first", PROMPT, TOKENS)
    others = [ask(str(seed), prompt_of(90, seed), 8) for seed in (7, 8)]
    engine.scheduler.submit([first])
    while len(first.generated) < 6:
        engine.step()
    sizes: list[int] = []
    engine.on_plan = lambda plan: sizes.extend(len(each.parcels) for each in plan.resizes)
    engine.generate(others)
    assert first.generated == expected
    assert len(set(sizes)) > 2, "nobody shrank"
    check(engine)


@pytest.mark.parametrize("fault", ["of a wrong layer", "before its anchor has resolved"])
def test_a_plan_replayed_wrongly_is_caught(
    model: CausalLM, expected: list[int], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plans: dict[int, list[MissPlan]] = {}  # by follower, as they came
    follow = Tiered.follow

    def wrong(
        self: Tiered, layer: int, batch: DecodeBatch, selected: torch.Tensor, anchor: Placement
    ) -> Placement:
        assert anchor.plan is not None
        plans.setdefault(layer, []).append(anchor.plan)
        if layer == 3:
            plan = plans[1][-1] if fault == "of a wrong layer" else plans[3][-2:][0]
            anchor = anchor._replace(plan=plan)
        return follow(self, layer, batch, selected, anchor)

    monkeypatch.setattr(Tiered, "follow", wrong)
    assert answer(engine_of(model, max_rows=1, prefetch=False)) != expected


@pytest.mark.parametrize("fault", ["of a wrong layer", "before its anchor has resolved", "not at all"])
def test_a_plan_prefetched_wrongly_is_caught(
    model: CausalLM, expected: list[int], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine = engine_of(model, max_rows=1)
    last: dict[int, Fetch] = {}  # by follower, as they were ordered
    start = AtOnce.start

    def wrong(self: AtOnce, work: Mapping[int, Fetch]) -> None:
        own: dict[int, Callable[[], None]] = dict(work)
        if 3 in work:
            wanted = {"of a wrong layer": last[1], "before its anchor has resolved": last.get(3)}.get(fault)
            # A fetch names its layer and its plan; only the plan is another's.
            fetch = work[3]
            own[3] = partial(fetch.func, fetch.args[0], wanted.args[1], ahead=True) if wanted else idle
        last.update(work)
        start(self, own)

    monkeypatch.setattr(AtOnce, "start", wrong)
    assert answer(engine) != expected


def test_misses_fetched_ahead_and_in_turn_are_the_same(model: CausalLM, expected: list[int]) -> None:
    for prefetch in (True, False):
        engine = engine_of(model, max_rows=1, prefetch=prefetch)
        assert answer(engine) == expected
        counters = engine.counters()
        assert torch.equal(counters[0::2, Counter.MISSES], counters[1::2, Counter.MISSES])
        waited = counters[1::2, Counter.NANOSECONDS] > 0
        assert bool(waited.all()) != prefetch, "only a fetch in its turn is waited for"
