"""A prefix that is found gives the tokens of one that is computed, in either residence, bounds included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.step_plan import StepPlan
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints

PROMPT = [3 + 7 * i % 200 for i in range(330)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("model"), "llama")


def engine(checkpoint: Path, arena_bytes: int = 16 * 2**20, **changes: object) -> OfflineEngine:
    base: dict[str, object] = {
        "model": checkpoint,
        "dtype": "float32",
        "budget_tokens": 32,
        "max_rows": 3,
        "max_model_len": 448,
        "max_step_tokens": 96,
    }
    return OfflineEngine(DecoderSettings.model_validate(base | changes), arena_bytes)


def ask(name: str, prompt: list[int], tokens: int = 20, **more: object) -> Sequence:
    return Sequence(name, 0, prompt, Sampling(), seed=1, max_tokens=tokens, **more)  # type: ignore[arg-type]  # data


@pytest.mark.parametrize("mode", ["tiered", "full"])
@pytest.mark.parametrize("selector", ["quest", "everything"])
def test_a_found_prefix_gives_the_same_tokens(checkpoint: Path, mode: str, selector: str) -> None:
    settings: dict[str, Any] = {"kv_mode": mode, "selector": selector}
    alone = ask("alone", PROMPT)
    engine(checkpoint, **settings, prefix_cache=False).generate([alone])
    assert alone.cached == 0

    ours = engine(checkpoint, **settings)
    first, again = ask("first", PROMPT), ask("again", PROMPT)
    for one in (first, again):
        ours.generate([one])
    assert (first.cached, again.cached) == (0, 320)
    assert first.generated == again.generated == alone.generated

    other, reference = PROMPT[:200] + [5] * 100, ask("reference", PROMPT[:200] + [5] * 100)
    engine(checkpoint, **settings, prefix_cache=False).generate([reference])
    ours.generate([branch := ask("branch", other), beside := ask("beside", PROMPT)])
    assert (branch.cached, beside.cached) == (192, 320)
    assert branch.generated == reference.generated
    assert beside.generated == alone.generated
    ours.scheduler.check_integrity()
    ours.runner.residence.check_integrity()


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_shared_prefix_has_one_set_of_device_pages(checkpoint: Path, mode: str) -> None:
    """In `full` its keys and values too, so that three rows fit where two would."""
    ours = engine(checkpoint, kv_mode=mode, device_cache_tokens=64 * 15)
    prompts = [PROMPT[:320] + [5 + number] * 20 for number in range(3)]
    alone = [ask(f"alone {number}", prompt) for number, prompt in enumerate(prompts)]
    for one in alone:
        ours.generate([one])
    together = [ask(str(number), prompt) for number, prompt in enumerate(prompts)]
    for one in together:
        ours.scheduler.submit([one])
    while not all(one.generated for one in together):
        ours.step()
    assert not any(one.finish for one in together)
    assert all(one.device_pages[:5] == together[0].device_pages[:5] for one in together)
    ours.generate([])
    assert [one.generated for one in together] == [one.generated for one in alone]
    ours.scheduler.check_integrity()
    ours.runner.residence.check_integrity()


def test_tenants_share_nothing(checkpoint: Path) -> None:
    ours = engine(checkpoint)
    one, other, again = ask("one", PROMPT), ask("other", PROMPT, salt=b"b"), ask("again", PROMPT, salt=b"b")
    for sequence in (one, other, again):
        ours.generate([sequence])
    assert (one.cached, other.cached, again.cached) == (0, 0, 320)
    assert one.generated == other.generated == again.generated


def test_a_preempted_answer_finds_its_prompt_again(checkpoint: Path) -> None:
    """Two long answers and host pages for less: the younger waits, and its prompt is not computed again."""
    ours = engine(checkpoint, arena_bytes=3_473_408)
    assert ours.host.total == 13
    alone = [ask(str(i), PROMPT[i:], 100) for i in range(2)]
    for sequence in alone:
        engine(checkpoint, prefix_cache=False).generate([sequence])
    both = [ask(str(i), PROMPT[i:], 100) for i in range(2)]
    computed = 0

    def count(plan: StepPlan) -> None:
        nonlocal computed
        computed += sum(end - start for one, start, end in plan.chunks if one is both[1])

    ours.on_plan = count
    ours.generate(both)
    assert ours.scheduler.releases > 0
    assert [sequence.generated for sequence in both] == [sequence.generated for sequence in alone]
    assert computed <= 329 + 329 - 256
    assert both[1].cached == 0, "its own pages, found again, are no merit of the cache"


@pytest.mark.parametrize("mode", ["tiered", "full"])
@pytest.mark.parametrize("sampled", [False, True])
def test_an_answer_to_be_replayed_is_found_too(checkpoint: Path, mode: str, sampled: bool) -> None:
    """As after an engine's death: the tokens so far are known, and most of their pages are in the store."""
    ours = engine(checkpoint, kv_mode=mode)
    first = ask("first", PROMPT[:200], 150)
    again = ask("again", PROMPT[:200], 150)
    if sampled:
        first.sampling = again.sampling = Sampling(temperature=0.9, frequency_penalty=0.3)
    ours.generate([first])
    again.known, again.reported = first.generated[:100], 100
    plans: list[StepPlan] = []
    ours.on_plan = plans.append
    ours.generate([again])
    assert again.generated == first.generated
    assert again.cached == 200
    assert len(plans) < 150 - (256 - 200) + 5, "tokens were computed that lay in the store"
    ours.scheduler.check_integrity()
    ours.runner.residence.check_integrity()


def test_a_whole_answer_known_ends_where_it_ended(checkpoint: Path) -> None:
    """Though the page of its last token but one is in the store."""
    ours = engine(checkpoint)
    first = ask("first", PROMPT[:200], 121)  # 320 computed tokens: five whole pages
    ours.generate([first])
    again = ask("again", PROMPT[:200], 121)
    again.known, again.reported = list(first.generated), 121
    ours.generate([again])
    assert again.generated == first.generated
    assert again.finish is first.finish
