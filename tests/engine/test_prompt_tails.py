"""The end of a prompt that is computed beside the steps: used once, for what it is of, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.contract.errors import SetupError
from services.decoder.attention.heart import Heart
from services.decoder.attention.step import Step
from services.decoder.engine import assembly, offline
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.prompt_tails import MOST_TOKENS, PromptTails
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.step_plan import Arrival
from services.decoder.kernels.dense import TorchDense
from services.decoder.kv.batch import PrefillChunk
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints

PROMPT = [(13 * i) % 200 for i in range(150)]
FOUND = 128  # of it, in whole pages
END = [7, 8, 9]


def request(name: str, prompt: list[int], tokens: int = 12) -> Sequence:
    return Sequence(name, 0, list(prompt), Sampling(), 3, tokens)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OfflineEngine:
    """Newcomers wait beside the steps, layers are walked one by one, and `PROMPT` is known."""
    for room in (offline, assembly):
        monkeypatch.setattr(room, "loads_beside", lambda device: True)
    monkeypatch.setattr(offline, "dense_ops", lambda device: TorchDense())
    settings = DecoderSettings.model_validate(
        {
            "model": checkpoints.save(tmp_path, "llama"),
            "dtype": "float32",
            "kv_mode": "full",
            "budget_tokens": 64,
            "max_rows": 3,
            "max_model_len": 512,
            "max_step_tokens": 320,
            "sampled_layers": 0,
            "share_device_pages": False,
        }
    )
    return OfflineEngine(settings, 8 * 2**20)


@pytest.fixture
def expected(engine: OfflineEngine) -> list[int]:
    """The answer to the prompt and its end, all of it computed in steps."""
    one = request("alone", [*PROMPT, *END])
    engine.generate([one])
    assert not one.cached
    return one.generated


@pytest.fixture
def talks(engine: OfflineEngine, expected: list[int]) -> Sequence:
    """One that decodes all the while."""
    one = request("talks", PROMPT[::-1], 300)
    engine.scheduler.submit([one])
    while not one.generated:
        engine.step()
    return one


def tails_of(engine: OfflineEngine) -> PromptTails:
    assert engine.runner.tails is not None
    return engine.runner.tails


def arrive(engine: OfflineEngine, one: Sequence) -> None:
    """Until its pages are there, and one layer of its end is launched."""
    engine.scheduler.submit([one])
    while tails_of(engine)._begun is None:
        engine.step()
        assert not one.generated


def finish(engine: OfflineEngine, one: Sequence) -> list[int]:
    """Its answer."""
    for _ in range(200):
        if one.finish:
            break
        engine.step()
        engine.scheduler.check_integrity()
    assert one.finish, "it waits for ever"
    return one.generated


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that steps computed, one number a step."""
    counts, hidden = [], CausalLM.hidden

    def counted(self: CausalLM, tokens: list[int], *rest: object) -> Tensor:
        counts.append(len(tokens))
        return hidden(self, tokens, *rest)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(CausalLM, "hidden", counted)
    return counts


def test_it_is_computed_layer_by_layer_while_others_go_on_and_not_again(
    engine: OfflineEngine, expected: list[int], talks: Sequence, computed: list[int]
) -> None:
    again, said = request("again", [*PROMPT, *END]), len(talks.generated)
    arrive(engine, again)
    computed.clear()
    assert finish(engine, again) == expected
    assert again.cached == FOUND
    assert max(computed) <= 2, "a step computed the end once more"
    assert len(talks.generated) >= said + engine.plan.shape.layers, "a step waited for more than a layer"
    assert not tails_of(engine)._ready


def test_alone_it_is_waited_for(engine: OfflineEngine, expected: list[int]) -> None:
    again = request("again", [*PROMPT, *END])
    engine.scheduler.submit([again])
    for _ in range(5):
        engine.step()
    assert again.generated
    assert finish(engine, again) == expected


def test_who_is_computed_does_not_wait_for_the_pages_of_another(
    engine: OfflineEngine, expected: list[int]
) -> None:
    """With nobody who decodes, a step waits for the first that comes, and for no more."""

    class Pages:
        """An event of the device's."""

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            raise AssertionError("it waits for the second one's pages")

    beside, first, second = engine.runner.beside, request("first", [*PROMPT, *END]), request("second", PROMPT)
    assert beside is not None
    first.row, first.computed = 0, FOUND
    beside._there.append(Arrival(second, []))
    beside._coming.append((Arrival(second, []), Pages()))  # type: ignore[arg-type]  # of a GPU it were
    beside.wait_for_one()
    assert [one.sequence for one in beside.arrived()] == [second]
    tails_of(engine)._passed.append(Arrival(first, []))
    beside.wait_for_one()
    assert [one.sequence for one in beside.arrived()] == [first]


def test_chunks_of_a_step_come_behind_it(
    engine: OfflineEngine,
    expected: list[int],
    talks: Sequence,
    computed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What has begun is finished first; who is due then is computed by a step."""
    tails, layers = tails_of(engine), Heart.prefill
    half_done: list[bool] = []

    def noted(self: Heart, layer: int, chunk: PrefillChunk, *rest: object) -> Tensor:
        if chunk.end - chunk.start > len(PROMPT) + len(END) - FOUND:  # the other prompt's
            half_done.append(tails._begun is not None or not tails._held)
        return layers(self, layer, chunk, *rest)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(Heart, "prefill", noted)
    first, second = (request(name, [*PROMPT, *END]) for name in ("first", "second"))
    other = [(17 * i + 3) % 200 for i in range(300)]
    arrive(engine, first)
    engine.scheduler.submit([request("other", other, 1)])
    engine.scheduler.submit([second])
    computed.clear()
    assert finish(engine, first) == expected
    assert finish(engine, second) == expected
    assert max(computed) > 60, "the other prompt was no step's"
    assert half_done
    assert not any(half_done)
    assert not tails._held


def test_a_step_that_computes_chunks_finds_none_half_done_and_keeps_nobody_waiting(
    engine: OfflineEngine, expected: list[int], talks: Sequence
) -> None:
    tails, first, second = tails_of(engine), request("first", [*PROMPT, *END]), request("second", PROMPT)
    arrive(engine, first)
    engine.scheduler.submit([second])
    while not tails._due:
        engine.step()
    assert tails._begun is not None
    tails.hold()
    assert not tails.advance()
    assert not tails.takes(second)
    assert [arrival.sequence for arrival in tails.told()] == [second, first]
    tails.release()
    assert tails.takes(second)


def test_whose_row_was_taken_before_the_step_is_computed_again(
    engine: OfflineEngine, expected: list[int], talks: Sequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same sequence, the same chunk, other pages; by a step, where a step has others to compute."""
    tails, again = tails_of(engine), request("again", [*PROMPT, *END])
    fills = request("fills", [9] * 10, 200)
    urgent = request("urgent", [(11 * i) % 200 for i in range(170)], 30)
    urgent.priority = -1
    engine.scheduler.submit([fills])
    arrive(engine, again)
    while not tails._ready:
        engine.step()
    engine.scheduler.submit([urgent])
    engine.step()
    assert again.row is None
    monkeypatch.setattr(tails, "takes", lambda sequence: False)
    assert finish(engine, again) == expected


def test_who_has_left_leaves_nothing_behind(
    engine: OfflineEngine, expected: list[int], talks: Sequence
) -> None:
    """Its row goes to one whose chunk has the same numbers and other tokens."""
    tails, gone = tails_of(engine), request("gone", [*PROMPT, 1, 1, 1])
    arrive(engine, gone)
    while not tails._ready:
        engine.step()
    assert list(tails._ready) == [gone.row]
    row, again = gone.row, request("again", [*PROMPT, *END])
    engine.scheduler.abort("gone", set())
    engine.step()
    assert not tails._ready
    engine.scheduler.submit([again])
    engine.step()
    assert again.row == row
    assert finish(engine, again) == expected


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SetupError("a kernel does not compile")])
def test_a_layer_that_fails_is_a_steps_to_compute(
    engine: OfflineEngine,
    expected: list[int],
    talks: Sequence,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    walk = CausalLM.walk

    def short(self: CausalLM, tokens: list[int], positions: list[int], step: Step) -> Iterator[Tensor]:
        yield next(walk(self, tokens, positions, step))
        raise error

    again = request("again", [*PROMPT, *END])
    with monkeypatch.context() as patch:
        patch.setattr(CausalLM, "walk", short)
        arrive(engine, again)
        tails_of(engine).advance()
    assert finish(engine, again) == expected


def test_a_lost_device_ends_the_engine(
    engine: OfflineEngine, talks: Sequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step would get any further, so nobody is told that one may."""

    def lost(self: CausalLM, tokens: list[int], positions: list[int], step: Step) -> Iterator[Tensor]:
        raise torch.AcceleratorError("an illegal memory access was encountered")
        yield

    monkeypatch.setattr(CausalLM, "walk", lost)
    again = request("again", [*PROMPT, *END])
    engine.scheduler.submit([again])
    with pytest.raises(torch.AcceleratorError):
        finish(engine, again)


def test_a_failed_step_takes_nothing_of_it_along(
    engine: OfflineEngine, expected: list[int], talks: Sequence, computed: list[int]
) -> None:
    again = request("again", [*PROMPT, *END])
    arrive(engine, again)
    engine.runner.wait()
    computed.clear()
    assert finish(engine, again) == expected
    assert max(computed) > len(END), "it was not computed by a step"


def test_a_long_end_is_a_steps_though_its_pages_came_beside(
    engine: OfflineEngine, talks: Sequence, computed: list[int]
) -> None:
    one = request("long", [*PROMPT[:FOUND], *([5] * (MOST_TOKENS + 1))])
    engine.scheduler.submit([one])
    finish(engine, one)
    assert one.cached == FOUND
    assert max(computed) > 60
