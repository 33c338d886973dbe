"""Parked and resumed, or released and replayed: the tokens and the bytes of a run that nobody disturbed."""

from __future__ import annotations

import random

import pytest
import torch

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Finish, SampledToken, Sampling, Sequence, TokenIds
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.engine.watch import Watch

PROMPT = [3 + 7 * i % 200 for i in range(150)]
TOKENS = 60
BLOCK, PAGE = 16, 64

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = checkpoints.save(tmp_path_factory.mktemp("model"), "llama")
    return CausalLM(ModelSpec.read(path), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module", params=["tiered", "full"])
def mode(request: pytest.FixtureRequest) -> str:
    kv_mode: str = request.param
    return kv_mode


def engine_of(model: CausalLM, mode: str, arena_pages: int = 40, **changes: int) -> OfflineEngine:
    """Small blocks chosen from many, so that wrong bounds choose others; room as the test says."""
    base = {"budget_tokens": 32, "hot_tokens": 48, "max_rows": 1, "max_model_len": 256, "max_step_tokens": 64}
    settings = DecoderSettings.model_validate({"model": "unused", "kv_mode": mode} | base | changes)
    page_bytes = 3 * (2 * 4 * BLOCK * 2 * 32 * 4 + 4 * 2 * 2 * 32 * 4)
    return OfflineEngine(settings, 2 * 2**20 + (arena_pages + 1) * page_bytes, model)


def ask(
    name: str,
    prompt: TokenIds = PROMPT,
    tokens: int = TOKENS,
    *,
    wish: Sampling | None = None,
    seed: int = 5,
    choice: int = 0,
    priority: int = 0,
) -> Sequence:
    return Sequence(name, choice, prompt, wish or Sampling(), seed, tokens, priority=priority)


class Told(dict[str, list[SampledToken]]):
    """By request and choice."""


def step(engine: OfflineEngine, told: Told) -> None:
    for one, tokens in engine.step():
        told.setdefault(f"{one.request_id} {one.choice}", []).extend(tokens)


def run(engine: OfflineEngine, told: Told | None = None) -> Told:
    """To the end, and everything is back."""
    told = Told() if told is None else told
    while engine.scheduler.has_work:
        step(engine, told)
    engine.scheduler.check_integrity()
    engine.runner.residence.check_integrity()
    assert engine.device_pages.free == engine.device_pages.count
    assert engine.host.free == engine.host.total
    return told


@pytest.fixture(scope="module")
def undisturbed(model: CausalLM, mode: str) -> tuple[list[int], list[torch.Tensor]]:
    """An answer and its bytes."""
    engine, alone = engine_of(model, mode, max_step_tokens=48), ask("alone")
    watch = Watch(engine, alone)
    engine.generate([alone])
    return alone.generated, watch.bytes()


# After so many generated tokens: just seated, inside a block, at a block's edge, past it, at a page's edge,
# past it, near the end. Negative: after so many of the prompt's chunks of 48.
@pytest.mark.parametrize("after", [-1, -2, -3, 1, 6, 11, 12, 43, 44, 59])
def test_parked_anywhere_and_resumed(
    model: CausalLM, mode: str, undisturbed: tuple[list[int], list[torch.Tensor]], after: int
) -> None:
    engine = engine_of(model, mode, max_step_tokens=48)
    parked, urgent = ask("parked"), ask("urgent", PROMPT[::-1], 20, priority=-1)
    watch = Watch(engine, parked, poison=True)
    engine.scheduler.submit([parked])
    while len(parked.generated) < after or parked.computed < min(len(PROMPT), -48 * after):
        engine.step()
    engine.scheduler.submit([urgent])
    engine.step()
    assert (parked.row, urgent.row) == (None, 0)
    assert len(parked.host_pages) > 0
    run(engine)
    assert engine.scheduler.parkings == 1
    assert engine.scheduler.releases == 0
    assert watch.loads == 1
    assert parked.generated == undisturbed[0]
    assert watch.computed == len(PROMPT) + TOKENS - 1, "something was computed twice"
    assert all(torch.equal(found, own) for found, own in zip(watch.bytes(), undisturbed[1], strict=True))


WISHES: dict[str, Sampling] = {
    "greedy": Sampling(),
    "penalties": Sampling(
        temperature=0.8, frequency_penalty=0.6, presence_penalty=0.3, repetition_penalty=1.3
    ),
    "log probabilities": Sampling(temperature=0.9, top_k=20, logprobs=True, top_logprobs=3),
    "prompt": Sampling(logprobs=True, prompt_logprobs=True, logit_bias=((7, 2.0),)),
}


ROOM: dict[str, dict[str, int]] = {
    "rows": {"max_rows": 2},
    "device pages": {"max_rows": 5, "device_cache_tokens": 7 * PAGE},
    "host pages": {"max_rows": 5, "arena_pages": 8},
    # Two floors of three blocks, in three layers of two groups.
    "hot slots": {"max_rows": 5, "hot_bytes": 2 * 3 * 3 * 2 * (BLOCK * 2 * 32 * 4 + 8)},
}


def crowd() -> list[Sequence]:
    """Two of them are choices of one request."""
    prompts = [PROMPT[place * 7 :] for place in range(4)]
    asked = [ask(name, prompts[place], 70, wish=WISHES[name]) for place, name in enumerate(WISHES)]
    for one in asked[1::2]:
        one.priority = 1
    return [*asked, ask("penalties", prompts[1], 70, wish=WISHES["penalties"], seed=6, choice=1, priority=1)]


@pytest.fixture(scope="module")
def alone(model: CausalLM, mode: str) -> tuple[list[Sequence], Told]:
    """Each of the crowd by itself, and what was told."""
    asked, told, idle = crowd(), Told(), engine_of(model, mode)
    for one in asked:
        idle.scheduler.submit([one])
        run(idle, told)
    return asked, told


@pytest.mark.parametrize("short_of", ROOM)
def test_short_of_anything_the_answers_are_those_of_an_idle_engine(
    model: CausalLM, mode: str, alone: tuple[list[Sequence], Told], short_of: str
) -> None:
    """Penalties, log probabilities and two choices of one request, with room for about two of the five."""
    engine, asked, told = engine_of(model, mode, **ROOM[short_of]), crowd(), Told()
    for one in asked:
        if one.priority:
            engine.scheduler.submit([one])
    for _ in range(20):
        step(engine, told)
    engine.scheduler.submit([one for one in asked if not one.priority])
    run(engine, told)
    assert (engine.scheduler.parkings > 0) == (mode == "tiered" or short_of != "hot slots")
    assert (engine.scheduler.releases > 0) == (short_of == "host pages")
    assert told.keys() == alone[1].keys()
    for one, right in zip(asked, alone[0], strict=True):
        assert one.generated == right.generated, one.request_id
        check_told(one.prompt_logprobs, right.prompt_logprobs)
    for name, tokens in told.items():
        check_told(tokens, alone[1][name])


def check_told(mine: list[SampledToken], right: list[SampledToken]) -> None:
    """The same tokens once each; log probabilities but for a batch's rounding."""
    assert [token.token for token in mine] == [token.token for token in right]
    for one, other in zip(mine, right, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_few_places_used_over_and_over_mix_nothing_up(model: CausalLM, mode: str) -> None:
    """Sixty short requests, some left early, through two rows and hardly more pages than those need."""
    engine = engine_of(model, mode, arena_pages=7, max_rows=2, device_cache_tokens=4 * PAGE)
    chance, idle = random.Random(mode), engine_of(model, mode)
    crowd = [
        ask(str(i), [chance.randrange(200) for _ in range(chance.randint(1, 100))], 25) for i in range(60)
    ]
    for one in crowd:
        engine.scheduler.submit([one])
        for _ in range(chance.randrange(30)):
            engine.step()
        if chance.random() < 0.2:
            engine.scheduler.abort(one.request_id, set())
    run(engine)
    for one in crowd:
        alone = ask("alone", one.prompt, 25)
        idle.generate([alone])
        assert one.generated == alone.generated[: len(one.generated)], one.request_id
        assert one.finish is Finish.ABORT or len(one.generated) == 25


def test_a_prompt_larger_than_the_devices_room_for_kv(model: CausalLM) -> None:
    """The hot buffer holds a fifth of it, the arena all."""
    tiered = engine_of(model, "tiered")
    one, right = ask("one", PROMPT + PROMPT[:70], 30), ask("right", PROMPT + PROMPT[:70], 30)
    plan = tiered.plan
    assert plan.hot_bytes < len(one.prompt) * plan.token_bytes / 4
    assert plan.resident_bytes == 0
    run_alone(tiered, one)
    run_alone(engine_of(model, "full"), right)
    assert one.generated == right.generated


def run_alone(engine: OfflineEngine, one: Sequence) -> None:
    engine.scheduler.submit([one])
    run(engine)
