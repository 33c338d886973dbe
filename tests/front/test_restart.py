"""An engine dies under requests in every state: they go on in its next life, or end with one clear error."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.decoder.front.sampling import choice_seed
from tests.front.fake_engine import _digit
from tests.front.live import LiveFront, chat_body, chunks_of, error_of, live_front, orders, until
from tests.front.test_disconnect import _send


def _metric(front: LiveFront, name: str) -> float:
    text = httpx.get(f"{front.url}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def _told(front: LiveFront, tokens: int) -> None:
    """Wait until this life of the fake engine has told so many tokens."""
    until(lambda: _metric(front, "hotset_generation_tokens_total") >= tokens, f"{tokens} tokens")


def _kill(front: LiveFront) -> None:
    os.kill(front.engine_pid, signal.SIGKILL)


def _lives(front: LiveFront) -> list[list[dict[str, Any]]]:
    """What was submitted to each life of the engine."""
    lives: list[list[dict[str, Any]]] = []
    for entry in front.journal:
        if "start" in entry:
            lives.append([])
        elif "submit" in entry:
            lives[-1].append(entry["submit"])
    return lives


SLOW = {"pause": 0.03}
REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("chat", {"max_tokens": 40, "temperature": 0, "cache_salt": orders(**SLOW)}),
    "sampled": ("chat", {"max_tokens": 40, "seed": 5, "cache_salt": orders(**SLOW, cached=3)}),
    "choices and log probabilities": (
        "chat",
        {"n": 3, "max_tokens": 40, "logprobs": True, "top_logprobs": 3, "cache_salt": orders(**SLOW)},
    ),
    "a stop text in pieces": (
        "chat",
        {
            "stop": ["ten!"],
            "logprobs": True,
            "cache_salt": orders(say="one two three four five six tea ten? ten! no", split=True, **SLOW),
        },
    ),
    "characters in pieces": (
        "completions",
        {"max_tokens": 90, "cache_salt": orders(say="né 日本語 🙂🙃 👩‍👩‍👧 ok", split=True, **SLOW)},
    ),
    "echo with log probabilities": (
        "completions",
        {"prompt": ["a b", "c"], "echo": True, "logprobs": 2, "max_tokens": 40, "cache_salt": orders(**SLOW)},
    ),
    "a stop text not at first": (
        "completions",
        {
            "min_tokens": 30,
            "max_tokens": 60,
            "stop": ["3"],
            "include_stop_str_in_output": True,
            "cache_salt": orders(**SLOW),
        },
    ),
    "several tokens an event": (
        "chat",
        {"max_tokens": 120, "temperature": 0, "cache_salt": orders(**SLOW, per_event=3)},
    ),
}


def _ask(front: LiveFront, name: str, *, stream: bool) -> Any:
    """The answer, without what differs between any two: ids and times; a stream as each choice's parts."""
    endpoint, fields = REQUESTS[name]
    fields = {"seed": 1} | fields
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    response = (front.chat if endpoint == "chat" else front.complete)(**fields)
    assert response.status_code == 200, response.text
    if not stream:
        body = response.json()
        return body["choices"], body["usage"]
    parts: dict[int, list[Any]] = {}
    usage = None
    for chunk in chunks_of(response):
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return parts, usage


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_kind_of_answer_goes_on_as_if_nothing_had_happened(default_model: Path, stream: bool) -> None:
    with live_front(default_model, "--max-rows=16") as front, ThreadPoolExecutor(16) as pool:

        def all_at_once() -> dict[str, Any]:
            asked = {name: pool.submit(_ask, front, name, stream=stream) for name in REQUESTS}
            return {name: answer.result() for name, answer in asked.items()}

        undisturbed = all_at_once()
        submitted = len(front.noted("submit"))
        told = _metric(front, "hotset_generation_tokens_total")
        disturbed = pool.submit(all_at_once)
        _told(front, int(told) + 150)
        _kill(front)
        for name, answer in disturbed.result().items():
            assert answer == undisturbed[name], name
        first, second = _lives(front)
        before = {request["request_id"]: request for request in first[submitted:]}
        assert len(before) == submitted
        assert 0 < len(second) <= submitted
        for request in second:
            known = before[request["request_id"]]
            assert all(choice["generated_tokens"] for choice in request["choices"])
            for choice in request["choices"]:
                del choice["generated_tokens"]
            assert request == known, "prompt, seeds and sampling stay"
        choices = sum(len(request["choices"]) for request in second)
        assert _metric(front, "hotset_requests_resubmitted_total") == choices
        assert _metric(front, "hotset_engine_restarts_total") == 1
        assert _metric(front, 'hotset_requests_total{endpoint="chat",outcome="error"}') == 0
        assert front.stop() == 0
        assert "event=stream_failed" not in front.log
        assert "never retrieved" not in front.log


def test_what_told_nothing_is_submitted_as_it_was_and_what_ended_is_not(default_model: Path) -> None:
    with live_front(default_model) as front, ThreadPoolExecutor() as pool:
        held = [
            pool.submit(front.chat, max_tokens=4, cache_salt=orders(hold=True, lives=1)) for _ in range(3)
        ]
        until(lambda: len(front.noted("submit")) == 3, "all to be there")
        assert front.chat(max_tokens=2).status_code == 200
        _kill(front)
        for answer in held:
            assert answer.result().status_code == 200
            assert answer.result().json()["usage"]["completion_tokens"] == 4
        first, second = _lives(front)
        by_id = sorted(first[:3], key=lambda request: request["request_id"])
        assert sorted(second, key=lambda request: request["request_id"]) == by_id
        assert front.stop() == 0


def test_only_the_choices_that_have_not_ended_go_on(default_model: Path) -> None:
    """The first choice comes upon its stop text soon, the second one never."""

    def digits(seed: int, choice: int) -> str:
        return "".join(str(_digit(choice_seed(seed, choice), place)) for place in range(40))

    seed = next(s for s in range(10**6) if "7" in digits(s, 0)[1:3] and "7" not in digits(s, 1))
    fields = {"n": 2, "seed": seed, "stop": "7", "max_tokens": 40, "cache_salt": orders(**SLOW)}
    with live_front(default_model) as front, ThreadPoolExecutor() as pool:
        right = front.chat(**fields).json()
        told = _metric(front, "hotset_generation_tokens_total")
        answer = pool.submit(front.chat, **fields)
        _told(front, int(told) + 16)
        _kill(front)
        body = answer.result().json()
        assert (body["choices"], body["usage"]) == (right["choices"], right["usage"])
        (again,) = _lives(front)[1]
        assert [choice["index"] for choice in again["choices"]] == [1]
        assert _metric(front, "hotset_requests_resubmitted_total") == 1
        assert front.stop() == 0


def test_a_stream_that_breaks_under_a_living_engine_is_a_death_too(default_model: Path) -> None:
    """The engine goes on to make events that nobody may see; it is ended, and another one takes over."""
    with live_front(default_model) as front, ThreadPoolExecutor() as pool:
        fields = {"max_tokens": 40, "temperature": 0, "cache_salt": orders(**SLOW)}
        right = front.chat(**fields).json()["choices"]
        answer = pool.submit(front.chat, **fields)
        cut = pool.submit(front.chat, max_tokens=20, cache_salt=orders(**SLOW, cut_after=8, lives=1))
        assert answer.result().json()["choices"] == right
        assert cut.result().json()["usage"]["completion_tokens"] == 20
        assert len(_lives(front)) == 2
        assert front.stop() == 0


def test_a_client_that_leaves_during_the_pause_is_not_taken_along(default_model: Path) -> None:
    with live_front(default_model, start={"later_delay": 1.0}) as front, ThreadPoolExecutor() as pool:
        salt = orders(hold=True, lives=1)
        stays = pool.submit(front.chat, max_tokens=3, cache_salt=salt)
        until(lambda: front.noted("submit"), "it to run")
        stayed = front.noted("submit")[0]["request_id"]
        with ExitStack() as leavers:
            for stream in (True, False):
                raw = _send(front, "/v1/chat/completions", chat_body(stream=stream, cache_salt=salt))
                leavers.enter_context(closing(raw))
            until(lambda: len(front.noted("submit")) == 3, "all to run")
            _kill(front)
            until(lambda: "event=engine_restart" in front.log, "the death to be noticed")
        until(lambda: front.log.count("status=499") == 2, "the leavers to be noticed")
        assert stays.result().status_code == 200
        assert [request["request_id"] for request in _lives(front)[1]] == [stayed]
        assert front.stop() == 0


@pytest.mark.parametrize("die_after", [0, 3], ids=["in its prompt", "while it answers"])
def test_a_request_that_ends_engines_ends_and_those_that_wait_go_on(
    default_model: Path, die_after: int
) -> None:
    with live_front(default_model, "--max-rows=1") as front, ThreadPoolExecutor() as pool:
        fatal = pool.submit(front.chat, cache_salt=orders(die_after=die_after, company=3, pause=0.3))
        until(lambda: front.noted("submit"), "it to run")
        others = [
            # Behind it in every life, in whatever order they are handed over.
            pool.submit(front.chat, max_tokens=3, priority=1, cache_salt=orders(hold=True, lives=2))
            for _ in range(2)
        ]
        response = fatal.result()
        assert response.status_code == 500
        assert error_of(response)["code"] == "request_ends_engines"
        assert response.headers["x-should-retry"] == "false"
        for other in others:
            assert other.result().status_code == 200
        assert [len(life) for life in _lives(front)] == [3, 3, 2]
        assert _metric(front, 'hotset_requests_total{endpoint="chat",outcome="error"}') == 1
        assert front.chat(max_tokens=1).status_code == 200
        assert front.stop() == 0


def test_within_a_stream_the_error_comes_once(default_model: Path) -> None:
    with live_front(default_model) as front:
        text = front.chat(stream=True, cache_salt=orders(die_after=2)).text
        assert text.count('"error"') == 1
        assert '"code":"request_ends_engines"' in text
        assert "[DONE]" not in text
        content = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        assert "error" in content[-1]
        assert front.stop() == 0


def test_an_engine_that_does_not_come_back_ends_all(default_model: Path) -> None:
    with (
        live_front(default_model, start={"later_fail": "the device is broken"}) as front,
        ThreadPoolExecutor() as pool,
    ):
        whole = [pool.submit(front.chat, cache_salt=orders(hold=True)) for _ in range(2)]
        streamed = pool.submit(front.chat, stream=True, cache_salt=orders(hold=True))
        until(lambda: len(front.noted("submit")) == 3, "all to run")
        with front.waiting() as waiting:
            _kill(front)
            for answer in whole:
                response = answer.result()
                assert response.status_code == 503
                assert error_of(response)["code"] == "engine_lost"
                assert "the device is broken" in error_of(response)["message"]
                assert int(response.headers["retry-after"]) > 0
            assert streamed.result().text.count('"code":"engine_lost"') == 1
        assert waiting.seconds < 25
        refused = front.chat()
        assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_not_ready")
        assert front.stop() == 0


def test_an_engine_that_starts_for_ever_is_waited_for_so_long(default_model: Path) -> None:
    with (
        live_front(default_model, "--restart-seconds=1.5", start={"later_delay": 3600}) as front,
        ThreadPoolExecutor() as pool,
    ):
        held = pool.submit(front.chat, cache_salt=orders(hold=True))
        until(lambda: front.noted("submit"), "it to run")
        began = time.monotonic()
        with front.waiting() as waiting:
            _kill(front)
            response = held.result()
        assert time.monotonic() - began > 1
        assert waiting.seconds < 6
        assert error_of(response)["code"] == "engine_lost"
        assert "within 1.5 s (" in error_of(response)["message"]  # and how far it is, if it has said so yet
        assert front.stop() == 0


def test_the_end_of_the_server_ends_the_wait(default_model: Path) -> None:
    with (
        live_front(default_model, "--shutdown-seconds=1", start={"later_delay": 3600, "deaf": True}) as front,
        ThreadPoolExecutor() as pool,
    ):
        held = pool.submit(front.chat, cache_salt=orders(hold=True))
        until(lambda: front.noted("submit"), "it to run")
        _kill(front)
        until(lambda: len(front.noted("start")) == 2, "the next life")
        with front.waiting() as waiting:
            assert front.stop() == 0
        assert waiting.seconds < 8
        assert error_of(held.result())["code"] == "shutting_down"


def test_a_full_engine_is_asked_again_and_one_that_refuses_is_not(default_model: Path) -> None:
    with live_front(default_model) as front, ThreadPoolExecutor() as pool:
        salts = [orders(hold=True, lives=1, refuse_again=error) for error in ("NoRoom", "InvalidRequest")]
        full, refused = (pool.submit(front.chat, max_tokens=3, cache_salt=salt) for salt in salts)
        until(lambda: len(front.noted("submit")) == 2, "both to run")
        _kill(front)
        assert full.result().status_code == 200
        assert refused.result().status_code == 400
        assert error_of(refused.result())["message"] == "as ordered"
        assert [len(life) for life in _lives(front)] == [2, 3]
        assert front.stop() == 0
