"""Front, engine and kvstore as they are, killed under eight streams: the tokens of an undisturbed run."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.processes import eventually
from tests.front.live import chat_body
from tests.front.real import Service, real_service, tiny_model

ARENA_BYTES = 64 * 2**20
TOLD, COMPUTED = "hotset_generation_tokens_total", "hotset_prompt_tokens_total"
PARKED = "hotset_rows_parked_total"
WHERE = "hotset_requests_waiting", "hotset_requests_running"
ROWS = 6
SLOW = pytest.mark.slow
LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 30


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", chat_body(**fields)


def _complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "fake"} | fields


STREAMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "greedy": _chat(temperature=0),
    "sampled": _chat(seed=5, temperature=0.9, top_p=0.95, min_p=0.01),
    "penalties": _chat(seed=6, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2),
    "log probabilities": _chat(seed=7, logprobs=True, top_logprobs=3),
    "choices": _chat(seed=8, n=2),
    "a stop text": _chat(seed=9),  # the text is one that comes; see _with_stop
    "echo": _complete(prompt=["a b c", "d e"], echo=True, logprobs=2, seed=10),
    "a long prompt": _complete(prompt=LONG, seed=11, min_tokens=100),
}
"""Ten choices, more than there are rows."""


@pytest.fixture(scope="module")
def service(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"), default_model)
    with real_service(model, ARENA_BYTES, max_rows=ROWS) as made:
        yield made


@pytest.fixture(scope="module")
def streams(service: Service) -> Mapping[str, tuple[str, dict[str, Any]]]:
    """With a stop text that comes after two thirds of its answer."""
    path, body = STREAMS["a stop text"]
    text = service.ask(path, body)[0][0].text
    return {**STREAMS, "a stop text": (path, body | {"stop": [text[len(text) * 2 // 3 :][:6]]})}


@pytest.fixture(scope="module")
def undisturbed(service: Service, streams: Mapping[str, Any]) -> dict[str, Any]:
    answers = service.ask_all(streams)
    assert answers["a stop text"][0][0].finish == "stop"
    assert answers["greedy"][1]["completion_tokens"] == 150
    return answers


def _kill_engine(service: Service) -> None:
    service.engine.kill()


def _kill_store(service: Service) -> None:
    service.store.end(signal.SIGKILL)
    service.store = service.keep(service.store.again())


def _kill_both(service: Service) -> None:
    service.engine.kill()
    _kill_store(service)


@pytest.mark.parametrize(
    ("kill", "after_tokens", "restarts"),
    [
        (_kill_engine, 0, 1),
        pytest.param(_kill_engine, 1, 1, marks=SLOW),
        pytest.param(_kill_engine, 400, 1, marks=SLOW),
        pytest.param(_kill_both, 0, 1, marks=SLOW),
        (_kill_both, 250, 1),
        pytest.param(_kill_store, 0, 0, marks=SLOW),
        (_kill_store, 200, 0),
    ],
    ids=["engine, queued", "engine, early", "engine", "both, queued", "both", "store, queued", "store"],
)
def test_killed_under_eight_streams(
    service: Service,
    streams: Mapping[str, Any],
    undisturbed: Mapping[str, Any],
    kill: Callable[[Service], None],
    after_tokens: int,
    restarts: int,
) -> None:
    def there() -> bool:
        waiting, running = map(service.metric, WHERE)
        return waiting + running == 10 and (after_tokens > 1 or waiting > 0)

    told = service.metric(TOLD)
    with ThreadPoolExecutor() as pool, restarted(service, restarts):
        asked = pool.submit(service.ask_all, streams)
        eventually("all are there", there)
        eventually("they answer", lambda: service.metric(TOLD) >= told + after_tokens)
        kill(service)
        answers = asked.result()
    compare(answers, undisturbed)


@pytest.mark.parametrize(
    ("stage", "kill", "restarts"),
    [
        pytest.param("prefill", _kill_engine, 1, marks=SLOW),
        pytest.param("prefill", _kill_both, 1, marks=SLOW),
        pytest.param("prefill", _kill_store, 0, marks=SLOW),
        ("parked", _kill_engine, 1),
        pytest.param("parked", _kill_both, 1, marks=SLOW),
        pytest.param("parked", _kill_store, 0, marks=SLOW),
    ],
)
def test_killed_in_prefill_and_while_some_are_parked(
    service: Service, stage: str, kill: Callable[[Service], None], restarts: int
) -> None:
    """Eight long prompts, none computed before; ROWS rows that urgent ones take from the others."""
    chance = random.Random(f"{kill} {stage}")
    words = [chance.choice(["cold", "clock", "April", "bright", "day"]) for _ in range(600)]
    # Long enough that a machine that stalls between two looks still finds them at it.
    low = {
        str(i): _complete(prompt=" ".join(words[i:]), seed=i, priority=1, max_tokens=400) for i in range(8)
    }
    urgent = {f"urgent {i}": _complete(prompt="a b c", seed=i, max_tokens=200) for i in range(3)}
    told, computed, parked = map(service.metric, (TOLD, COMPUTED, PARKED))
    with ThreadPoolExecutor() as pool, restarted(service, restarts):
        asked = pool.submit(service.ask_all, low)
        if stage == "prefill":
            eventually("all are there", lambda: sum(map(service.metric, WHERE)) == 8)
            eventually("a prompt is computed", lambda: service.metric(COMPUTED) > computed + 64)
            kill(service)
            answers = asked.result()
        else:
            # Prompts are computed one after the other, so rows fill up while the first already answers.
            eventually("every row is taken", lambda: service.metric(WHERE[1]) == ROWS)
            eventually("they answer", lambda: service.metric(TOLD) > told + 60)
            also = pool.submit(service.ask_all, urgent)
            eventually("some are parked", lambda: service.metric(PARKED) > parked)
            kill(service)
            answers = asked.result() | also.result()
    right = service.ask_all(low | urgent)
    compare(answers, {name: right[name] for name in answers})


@SLOW
def test_a_request_under_which_the_engine_dies_twice_ends_with_one_error(
    service: Service, streams: Mapping[str, Any], undisturbed: Mapping[str, Any]
) -> None:
    """Those that had no row yet go on, and so does the server."""
    path, body = _complete(prompt=LONG, seed=3, max_tokens=900, stream=True, ignore_eos=True)
    with ThreadPoolExecutor() as pool:
        with restarted(service, 2, resubmitted=1):
            asked = pool.submit(httpx.post, f"{service.url}{path}", json=body, timeout=120)
            for _ in range(2):
                eventually("it runs", lambda: service.metric("hotset_requests_running") == 1)
                pid = service.engine.pid
                service.engine.kill()
                eventually("a new life", lambda was=pid: service.has_engine_after(was))  # type: ignore[misc]  # mypy cannot type a default of a lambda
        events = [line for line in asked.result().text.split("\n\n") if line]
    errors = [json.loads(event.removeprefix("data: ")) for event in events if '"error"' in event]
    assert [error["error"]["code"] for error in errors] == ["request_ends_engines"]
    assert events[-1] == "data: [DONE]" or '"error"' in events[-1]
    compare(service.ask_all(streams), undisturbed)


@contextmanager
def restarted(service: Service, restarts: int, resubmitted: int | None = None) -> Iterator[None]:
    """What is done inside costs so many engines, and leaves nothing behind."""
    lives = service.metric("hotset_engine_restarts_total")
    taken_along = service.metric("hotset_requests_resubmitted_total")
    yield
    assert service.metric("hotset_engine_restarts_total") == lives + restarts
    taken_along = service.metric("hotset_requests_resubmitted_total") - taken_along
    assert (taken_along > 0) == bool(restarts)
    assert resubmitted in (None, taken_along)
    eventually("the engine is idle", lambda: service.metric("hotset_requests_running") == 0)
    eventually("no page is held", lambda: service.held_pages() == 0)
    assert service.metric("hotset_integrity_violations_total") == 0
    assert "Traceback" not in service.front.text


def compare(answers: Mapping[str, Any], undisturbed: Mapping[str, Any]) -> None:
    """Text, tokens, ends, log probabilities and usage."""
    assert answers.keys() == undisturbed.keys()
    for name, (choices, usage) in undisturbed.items():
        found, found_usage = answers[name]
        assert found.keys() == choices.keys()
        for index, right in choices.items():
            assert found[index].text == right.text, name
            assert (found[index].finish, found[index].tokens) == (right.finish, right.tokens), name
            assert found[index].logprobs == pytest.approx(right.logprobs, abs=1e-3), name
        assert found_usage == usage, name
