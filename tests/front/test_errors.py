"""Every error code, provoked on a live server, in OpenAI's shape."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import httpx
import pytest

from services.decoder.front import errors
from tests.front.live import LiveFront, chat_body, error_of, live_front, orders, until

Provoke = Callable[[LiveFront], httpx.Response]

PROVOKED: dict[str, tuple[int, str, str | None, Provoke]] = {
    "context_length_exceeded": (
        400,
        "invalid_request_error",
        None,
        lambda front: front.complete(prompt=[5] * 5000),
    ),
    "invalid_json": (
        400,
        "invalid_request_error",
        None,
        lambda front: httpx.post(
            f"{front.url}/v1/completions", content=b"{", headers={"content-type": "application/json"}
        ),
    ),
    "invalid_type": (400, "invalid_request_error", "top_p", lambda front: front.chat(top_p="1")),
    "invalid_value": (400, "invalid_request_error", "top_p", lambda front: front.chat(top_p=0)),
    "missing_required_parameter": (
        400,
        "invalid_request_error",
        "prompt",
        lambda front: front.post("/v1/completions", {"model": "fake"}),
    ),
    "unknown_parameter": (
        400,
        "invalid_request_error",
        "tempurature",
        lambda front: front.chat(tempurature=1),
    ),
    "unsupported_parameter": (
        400,
        "invalid_request_error",
        "tools",
        lambda front: front.chat(tools=[{"type": "function", "function": {"name": "f"}}]),
    ),
    "priority_not_allowed": (403, "invalid_request_error", "priority", lambda front: front.chat(priority=-1)),
    "model_not_found": (404, "invalid_request_error", "model", lambda front: front.chat(model="gpt-4")),
    "unknown_url": (404, "invalid_request_error", None, lambda front: front.post("/v1/embeddings", {})),
    "method_not_allowed": (
        405,
        "invalid_request_error",
        None,
        lambda front: httpx.get(f"{front.url}/v1/completions"),
    ),
    "request_too_large": (
        413,
        "invalid_request_error",
        None,
        lambda front: front.complete(prompt="x" * 2_000_000),
    ),
    "unsupported_media_type": (
        415,
        "invalid_request_error",
        None,
        lambda front: httpx.post(f"{front.url}/v1/completions", data={"prompt": "x"}),
    ),
    "engine_error": (500, "server_error", None, lambda front: front.chat(cache_salt=orders(error_after=1))),
    "internal_error": (
        500,
        "server_error",
        None,
        lambda front: front.chat(cache_salt=orders(refuse="HotsetError")),
    ),
    "engine_lost": (503, "server_error", None, lambda front: front.chat(cache_salt=orders(abort_after=1))),
}
ELSEWHERE = {
    "invalid_api_key",
    "rate_limit_exceeded",
    "engine_not_ready",
    "shutting_down",
    "request_ends_engines",
}
"""Those that need a server of their own, below and in the tests of restarts."""


@pytest.mark.parametrize("code", PROVOKED)
def test_the_error_of_each_code(front: LiveFront, code: str) -> None:
    status, kind, param, provoke = PROVOKED[code]
    response = provoke(front)
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"], error["code"]) == (status, kind, param, code)
    assert ("retry-after" in response.headers) == (status == 503)
    assert response.headers["x-request-id"]


def test_no_code_is_forgotten() -> None:
    def below(kind: type[errors.ApiError]) -> Iterator[type[errors.ApiError]]:
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    codes = {kind.code for kind in below(errors.ApiError)} | set(get_args(errors.RequestCode))
    assert codes == {*PROVOKED, *ELSEWHERE}
    assert errors.__doc__
    for kind in below(errors.ApiError):
        assert f"+-- {kind.__name__} " in errors.__doc__
        assert kind.code in errors.__doc__ or kind is errors.BadRequest


def test_the_context_error_states_limit_and_need(front: LiveFront) -> None:
    error = error_of(front.complete(prompt=[5] * 4000, max_tokens=97))
    assert "4096" in error["message"]
    assert "4097" in error["message"]
    assert front.complete(prompt=[5] * 4000, max_tokens=96).status_code == 200
    assert front.complete(prompt=[5] * 4095).json()["error"]["code"] == "context_length_exceeded"
    assert front.complete(prompt=[5] * 4095, max_tokens=1).status_code == 200


def test_a_full_queue_is_429_and_passes(default_model: Path) -> None:
    with (
        live_front(default_model, "--max-rows=1", "--max-waiting=1", "--shutdown-seconds=0") as front,
        ThreadPoolExecutor() as pool,
    ):
        held = [pool.submit(_held_chat, front) for _ in range(2)]
        until(lambda: len(front.noted("submit")) == 2, "both to be submitted")
        refused = front.chat()
        assert refused.status_code == 429
        error = error_of(refused)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) > 0
        # A list of prompts is taken whole or not at all.
        assert front.complete(prompt=["a", "b"]).status_code == 429
        front.process.send_signal(signal.SIGTERM)
        assert [future.result().status_code for future in held] == [503, 503]


def test_one_that_waited_too_long_is_told_to_come_again(front: LiveFront) -> None:
    refused = front.chat(cache_salt=orders(no_room="no room came free in 30 s; send the request again later"))
    assert refused.status_code == 429
    assert error_of(refused)["code"] == "rate_limit_exceeded"
    assert "no room came free in 30 s" in error_of(refused)["message"]
    assert int(refused.headers["retry-after"]) > 0


def _held_chat(front: LiveFront) -> httpx.Response:
    return front.chat(cache_salt=orders(hold=True))


def test_before_the_engine_is_ready(default_model: Path) -> None:
    with live_front(default_model, start={"delay": 3600}, wait=False) as front:
        front.until_listening()
        until(lambda: "pretended weights" in httpx.get(f"{front.url}/health").text, "the engine's progress")
        health = httpx.get(f"{front.url}/health")
        assert health.status_code == 200
        assert health.json() == {"status": "starting", "detail": "loading pretended weights"}
        for response in (front.chat(), httpx.get(f"{front.url}/ready")):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            error = error_of(response)
            assert (error["type"], error["code"]) == ("server_error", "engine_not_ready")
            assert "loading pretended weights" in error["message"]
        # What needs no engine works: text, models, figures.
        assert front.post("/tokenize", {"prompt": "hi"}).json()["max_model_len"] is None
        assert httpx.get(f"{front.url}/v1/models").json()["data"][0]["id"] == "fake"
        assert 'hotset_engine_ready{engine="0"} 0.0' in httpx.get(f"{front.url}/metrics").text
        assert front.stop() == 0


def test_during_the_end(default_model: Path) -> None:
    with (
        live_front(default_model, "--shutdown-seconds=2") as front,
        ThreadPoolExecutor() as pool,
        httpx.Client(base_url=front.url) as early,
    ):
        assert early.get("/health").json()["status"] == "ok"
        held = pool.submit(_held_chat, front)
        until(lambda: front.noted("submit"), "it to run")
        os.kill(front.process.pid, signal.SIGTERM)
        until(lambda: "event=draining" in front.log, "the end to begin")
        assert early.get("/health").json()["status"] == "draining"
        refused = early.post("/v1/chat/completions", json=chat_body())
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "shutting_down"
        assert error_of(held.result())["code"] == "shutting_down"
        assert front.until_exit() == 0


def test_keys(default_model: Path) -> None:
    with live_front(default_model, "--api-keys=sesame", "--api-keys=öffne", wait=False) as front:
        front.until_listening()
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert httpx.get(f"{front.url}{path}").status_code == 200
        bad = (b"", b"Bearer", b"Bearer sesam", b"Bearer sesame2", b"Basic sesame", b"Bearer \xff\xfe")
        for value in bad:
            headers = {b"authorization": value} if value else {}
            for path in ("/v1/models", "/v1/nothing", "/health/x"):
                response = httpx.get(f"{front.url}{path}", headers=headers)
                assert response.status_code == 401, (value, path)
                assert error_of(response)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert "sesam" not in response.text
        for key in (b"sesame", "öffne".encode()):
            response = httpx.get(f"{front.url}/v1/models", headers={b"authorization": b"Bearer " + key})
            assert response.status_code == 200
        assert httpx.get(f"{front.url}/openapi.json").json()["components"]["securitySchemes"]
        assert front.stop() == 0
        assert "sesame" not in front.log
