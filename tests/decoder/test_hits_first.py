"""Hits first: two halves are the whole, nothing is read before it is there, and off it is not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from services.decoder.engine.assembly import page_hasher
from services.decoder.engine.offline import OfflineEngine
from services.decoder.kernels.attend import attend_slots
from services.decoder.kernels.attend_half import attend_half, attend_latent_half, split_of
from services.decoder.kernels.attend_latent import attend_latent
from services.decoder.kernels.attend_part import merge_parts
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.latent_twins import LatentTwins
from services.decoder.kernels.record_code import code_records
from services.decoder.kernels.replay import fetches, plan_of, replay
from services.decoder.kernels.resolve import resolve
from services.decoder.kernels.step_kernels import LayerStore, MissPlan
from services.decoder.kernels.twins import Twins
from services.decoder.kv.prefetch import AtOnce
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.decoder import block_rig, checkpoints, dsa_rig
from tests.decoder.dsa_rig import ask, check, prompt_of
from tests.decoder.test_replay import BLOCKS, LANES, TOP_K, layer_with

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = float("nan")
ROWS, WIDTH, BLOCK = 4, 5, 3
LENGTHS = (40, 31, 24, 38)
HITS: Mapping[str, tuple[tuple[bool, ...], ...]] = {
    "all hits": ((True,) * WIDTH,) * ROWS,
    "all misses": ((False,) * WIDTH,) * ROWS,
    "mixed": ((True, False, False, True, False),) * ROWS,
    "one without hits beside one without misses": ((False,) * WIDTH, (True,) * WIDTH) * 2,
}


def chosen(heads: int, record: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks in slots of their own, the open one last, some places empty; all else of the pool is NaN."""
    generator = torch.Generator().manual_seed(heads)
    selected = torch.tensor([[7, 2, -1, 0, 13], [1, 4, 9, -1, 10], [0, 3, 5, 2, 7], [8, -1, 11, 2, 12]])
    slots = torch.randperm(30, generator=generator)[: selected.numel()].view_as(selected)
    slots[selected < 0] = -1
    pool = torch.full((30, BLOCK, *record), NAN)
    for row, column in (selected >= 0).nonzero().tolist():
        tokens = min(BLOCK, LENGTHS[row] - int(selected[row, column]) * BLOCK)
        pool[slots[row, column], :tokens] = torch.randn(tokens, *record, generator=generator)
    return pool, slots.int(), selected.int(), torch.tensor(LENGTHS)


def halves(pool: Tensor, slots: Tensor, selected: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The pool before what misses is there, and both halves of the selection."""
    is_hit = torch.tensor(HITS[name])
    before = pool.clone()
    before[slots[(selected >= 0) & ~is_hit].long()] = NAN
    return before, selected.masked_fill(~is_hit, -1), selected.masked_fill(is_hit, -1)


@pytest.mark.parametrize("name", HITS)
def test_two_halves_are_the_attention_over_blocks(name: str) -> None:
    pool, slots, selected, length = chosen(6, (2, 2, 8))
    query = torch.randn(ROWS, 6, 8, generator=torch.Generator().manual_seed(1))
    before, hits, misses = halves(pool, slots, selected, name)
    part = attend_half(query, before, slots, hits, length, 0.4)
    whole = merge_parts(part, attend_half(query, pool, slots, misses, length, 0.4), torch.float32)
    expected = attend_slots(query, pool.nan_to_num(), slots, selected, length, 0.4)
    torch.testing.assert_close(whole.out, expected, atol=1e-6, rtol=1e-5)
    nobody = [row for row in range(ROWS) if not bool((hits[row] >= 0).any())]
    assert not part.out[nobody].any()


@pytest.mark.parametrize("name", HITS)
def test_two_halves_are_the_attention_over_latent_records(name: str) -> None:
    pool, slots, selected, length = chosen(5, (12,))
    query = torch.randn(ROWS, 5, 12, generator=torch.Generator().manual_seed(1))
    before, hits, misses = halves(pool, slots, selected, name)
    part = attend_latent_half(query, before, slots, hits, length, 0.4, 8)
    whole = merge_parts(part, attend_latent_half(query, pool, slots, misses, length, 0.4, 8), torch.float32)
    expected = attend_latent(query, pool.nan_to_num(), slots, selected, length, 0.4, 8)
    torch.testing.assert_close(whole.out, expected, atol=1e-6, rtol=1e-5)


def test_two_halves_are_the_attention_over_records_in_eight_bits() -> None:
    latent, roped = 128, 16
    pool, slots, selected, length = chosen(3, (latent + roped,))
    query = torch.randn(ROWS, 3, latent + roped, generator=torch.Generator().manual_seed(1))
    coded = code_records(pool.nan_to_num().flatten(0, 1), latent).view(30, BLOCK, -1)
    _, hits, misses = halves(pool, slots, selected, "mixed")
    early, late = (
        attend_latent_half(query, coded, slots, half, length, 0.1, latent) for half in (hits, misses)
    )
    expected = attend_latent(query, coded, slots, selected, length, 0.1, latent)
    whole = merge_parts(early, late, torch.float32)
    torch.testing.assert_close(whole.out, expected, atol=1e-6, rtol=1e-5)


def test_what_is_resident_and_what_is_fetched_make_up_the_selection() -> None:
    """Repetitions among them; the open block is nobody's fetch, whether it has a slot by now or gets one."""
    generator = torch.Generator().manual_seed(5)
    layer = layer_with(1000)
    apart = LayerStore(layer.tables, layer.pool, None, layer.counters)
    home = torch.arange(LANES * BLOCKS).view(LANES, BLOCKS)
    opened = torch.full((LANES,), 20)
    seen = [0, 0, 0]
    for step in range(40):
        opened += step % 4 == 0
        selected = torch.randint(-1, 20, (LANES, TOP_K), generator=generator).int()
        selected[:, step % TOP_K] = opened.int()
        before = layer.pool.clone()
        known = layer.tables.block_to_slot.gather(1, selected.clamp_min(0).long()) >= 0
        is_open = selected == opened.unsqueeze(1)
        found = resolve(apart, torch.arange(LANES), selected, opened, home)
        split = split_of(found, selected)
        there = (selected >= 0) & (known | is_open)
        assert torch.equal(split.hits, selected.masked_fill(~there, -1))
        for lane in range(LANES):
            wanted = dict.fromkeys(selected[lane, (selected[lane] >= 0) & ~there[lane]].tolist())
            assert split.misses[lane].tolist() == [*wanted, *[-1] * (TOP_K - len(wanted))]
        assert torch.equal(layer.pool, before), "something was fetched"
        plan = plan_of(found, home)
        replay(layer, plan)
        assert layer.arena is not None
        come = split.misses >= 0
        source = home.gather(1, split.misses.clamp_min(0).long())[come]
        assert torch.equal(layer.pool[plan.target[come].long()], layer.arena[source])
        seen[0] += int((split.hits >= 0).sum())
        seen[1] += int((split.misses >= 0).sum())
        seen[2] += int((is_open & ~known).sum())
    assert min(seen) > 0


class Late(AtOnce):
    """Fetches that come when they are waited for; until then NaN lies in the slots that they fill."""

    def __init__(self) -> None:
        self.under_way: dict[int, Callable[[], None]] = {}
        self.waits = 0

    def start(self, work: Mapping[int, Callable[[], None]]) -> None:
        for layer, fetch in work.items():
            assert isinstance(fetch, partial)
            store, plan = fetch.args
            assert isinstance(store, LayerStore)
            assert isinstance(plan, MissPlan)
            store.pool[fetches(plan)[1]] = NAN
            assert layer not in self.under_way, "nobody waited in the step before"
            self.under_way[layer] = fetch

    def wait(self, layer: int) -> None:
        self.under_way.pop(layer)()
        self.waits += 1


Make = Callable[..., OfflineEngine]  # of a model, and then of changes to its settings


def settled(engine: OfflineEngine, lengths: tuple[int, ...] = (150, 70, 210)) -> list[list[int]]:
    """Greedy answers of some rows."""
    asked = [ask(str(i), prompt_of(length, i), 24) for i, length in enumerate(lengths)]
    engine.generate(asked)
    check(engine)
    return [one.generated for one in asked]


def make_dsa(model: CausalLM, **changes: object) -> OfflineEngine:
    return dsa_rig.engine_of(model, **changes)


def make_blocks(model: CausalLM, **changes: object) -> OfflineEngine:
    make: Make = block_rig.engine_of
    return make(model, **({"max_step_tokens": 512} | changes))


def make_quest(model: CausalLM, **changes: object) -> OfflineEngine:
    small = {"block_tokens": 2, "budget_tokens": 16, "hot_tokens": 18, "max_step_tokens": 512}
    return dsa_rig.engine_of(model, **(small | changes))


MODELS: Mapping[str, tuple[Make, str, Mapping[str, object]]] = {
    "quest": (make_quest, "llama", {}),
    "dsa": (make_dsa, *dsa_rig.CASES["deepseek"]),
    "dsa shared": (make_dsa, *dsa_rig.CASES["glm shared"]),
    "nsa": (make_blocks, block_rig.KINDS["nsa"], {}),
    "m3": (make_blocks, block_rig.KINDS["m3"], {}),
}


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    make, model_type, changes = MODELS[request.param]
    path = checkpoints.save(tmp_path_factory.mktemp("hits_first"), model_type, **changes)
    model = CausalLM(ModelSpec.read(path), torch.float32, torch.device("cpu"))
    return partial(make, model)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """What every engine from now on fetches by, beside its computation."""
    one = Late()
    monkeypatch.setattr("services.decoder.engine.assembly.AtOnce", lambda: one)
    return one


def test_answers_are_the_usual_ones_however_late_misses_come(made: Make, late: Late) -> None:
    """With few slots, so that over 20% miss; in float32, where the order of sums decides no token."""
    usual = made(prefetch=False)
    expected = settled(usual)
    counted = usual.counters()[:, : Counter.NANOSECONDS]
    assert late.waits == 0
    for prefetch in (True, False):
        engine = made(hits_first=True, prefetch=prefetch)
        assert settled(engine) == expected
        assert late.waits > 0
        assert not late.under_way
        assert torch.equal(engine.counters()[:, : Counter.NANOSECONDS], counted)
        assert not engine.counters()[:, Counter.NANOSECONDS].any(), "nobody is known to wait"
    misses, chosen = int(counted[:, Counter.MISSES].sum()), int(counted[:, Counter.CHOSEN].sum())
    assert misses > 0.2 * chosen


def test_misses_that_are_not_waited_for_are_caught(
    made: Make, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = settled(made(prefetch=False))
    monkeypatch.setattr(Late, "wait", lambda self, layer: self.under_way.pop(layer, None))
    assert settled(made(hits_first=True)) != expected


def test_off_it_is_not_there(made: Make, late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is split, started or merged, and answers' pages have the names that they always had."""

    def never(*args: object, **more: object) -> None:
        raise AssertionError("hits first is off")

    for owner, name in ((Twins, "attend_half"), (LatentTwins, "attend_half"), (Twins, "merge_parts")):
        monkeypatch.setattr(owner, name, never)
    for place in ("heart.attend_halves", "latent_heart.attend_halves"):
        monkeypatch.setattr(f"services.decoder.attention.{place}", never)
    engine = made(prefetch=False, max_step_tokens=512, window_tokens=1024)
    settled(engine, (40, 30, 50))
    assert late.waits == 0
    settings = engine.plan.settings
    named = (settings.selector, settings.quest_sharing, settings.budget_tokens, settings.dense_layers)
    without = page_hasher(engine.plan, b"")
    assert without is not None
    assert without.decoding == repr(named).encode()
    first = page_hasher(made(hits_first=True).plan, b"")
    assert first is not None
    assert first.decoding != without.decoding, "an engine that promises exactness would find inexact pages"


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"kv_mode": "full"}, "full misses nothing"), ({"store_access": "remote"}, "needs the arena mapped")],
)
def test_where_nothing_can_come_later_it_is_refused(changes: Mapping[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        DecoderSettings.model_validate({"model": Path("unused"), "hits_first": True, **changes})
