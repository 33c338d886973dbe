"""Whatever a client sends, it gets a 4xx that says why, and the server lives."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.front.live import LiveFront, chat_body, error_of

JSON = {"content-type": "application/json"}

FIELDS: dict[str, tuple[dict[str, Any], str, str]] = {
    # what is sent with a chat, the field named, the code
    "NaN as text": ({"temperature": "NaN"}, "temperature", "invalid_type"),
    "too hot": ({"temperature": 2.1}, "temperature", "invalid_value"),
    "negative": ({"temperature": -0.1}, "temperature", "invalid_value"),
    "a flag for a number": ({"top_p": True}, "top_p", "invalid_type"),
    "huge integer": ({"max_tokens": 10**300}, "max_tokens", "invalid_value"),
    "huge seed": ({"seed": 2**64}, "seed", "invalid_value"),
    "fraction": ({"n": 1.5}, "n", "invalid_type"),
    "none at all": ({"n": 0}, "n", "invalid_value"),
    "too many": ({"n": 129}, "n", "invalid_value"),
    "zero tokens": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "two lengths": ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value"),
    "min above max": ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "invalid_value"),
    "empty stop": ({"stop": ""}, "stop", "invalid_value"),
    "empty stop in a list": ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    "17 stops": ({"stop": list("abcdefghijklmnopq")}, "stop", "invalid_value"),
    "endless stop": ({"stop": "x" * 1025}, "stop", "invalid_value"),
    "bias of a word": ({"logit_bias": {"hello": 1}}, "logit_bias.hello", "invalid_value"),
    "bias too strong": ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    "bias outside the vocabulary": ({"logit_bias": {"49152": 1}}, "logit_bias", "invalid_value"),
    "stop token outside the vocabulary": ({"stop_token_ids": [49152]}, "stop_token_ids", "invalid_value"),
    "top without logprobs": ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    "top too many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "logprobs as a count": ({"logprobs": 2}, "logprobs", "invalid_type"),
    "counts in every chunk, and none": (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "invalid_value",
    ),
    "stream options without a stream": ({"stream_options": {}}, "stream_options", "invalid_value"),
    "unknown stream option": (
        {"stream": True, "stream_options": {"include_all": True}},
        "stream_options.include_all",
        "unknown_parameter",
    ),
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "messages as text": ({"messages": "hi"}, "messages", "invalid_type"),
    "a message as text": ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    "no role": ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    "strange role": ({"messages": [{"role": "cat", "content": "x"}]}, "messages[0].role", "invalid_value"),
    "a tool's turn": (
        {"messages": [{"role": "tool", "tool_call_id": "1", "content": "x"}]},
        "messages[0].role",
        "unsupported_parameter",
    ),
    "content null": (
        {"messages": [{"role": "user", "content": None}]},
        "messages[0].content",
        "invalid_type",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    "half a surrogate pair": (
        {"messages": [{"role": "user", "content": "a\ud800b"}]},
        "messages[0].content",
        "invalid_value",
    ),
    "tools": ({"tools": [{}]}, "tools", "unsupported_parameter"),
    "tool choice": ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    "functions": ({"functions": [{}]}, "functions", "unsupported_parameter"),
    "JSON mode": ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    "prediction": ({"prediction": {"type": "content"}}, "prediction", "unsupported_parameter"),
    "store": ({"store": True}, "store", "unsupported_parameter"),
    "store as 1": ({"store": 1}, "store", "unsupported_parameter"),
    "search": ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    "priority tier": ({"service_tier": "priority"}, "service_tier", "unsupported_parameter"),
    "unknown": ({"top_kk": 1}, "top_kk", "unknown_parameter"),
    "unknown and strange": ({"[x](y) - str": 1}, "[x](y) - str", "unknown_parameter"),
    "salt of half a character": ({"cache_salt": "\udfff"}, "cache_salt", "invalid_value"),
    "model of half a character": ({"model": "\udfff"}, "model", "invalid_value"),
}


def _post(front: LiveFront, path: str, content: bytes) -> httpx.Response:
    return httpx.post(f"{front.url}{path}", content=content, headers=JSON, timeout=30)


@pytest.mark.parametrize("case", FIELDS)
def test_a_bad_field_is_named(front: LiveFront, case: str) -> None:
    fields, param, code = FIELDS[case]
    response = _post(front, "/v1/chat/completions", json.dumps(chat_body(**fields)).encode())
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code), error


PROMPTS: dict[str, Any] = {
    "empty": "",
    "empty list": [],
    "empty token list": [[]],
    "an empty text in a list": ["a", ""],
    "number": 5,
    "null": None,
    "fractions": [[1.5]],
    "mixed": ["a", 1],
    "mixed the other way": [1, "a"],
    "negative id": [-1],
    "id outside the vocabulary": [49152],
    "enormous id": [2**32],
    "too many": ["a"] * 129,
    "many wrong ones": [1.5] * 200_000,
    "half a surrogate pair": "\ud800",
}


@pytest.mark.parametrize("case", PROMPTS)
def test_a_bad_prompt_is_refused(front: LiveFront, case: str) -> None:
    began = time.monotonic()
    response = _post(
        front, "/v1/completions", json.dumps({"model": "fake", "prompt": PROMPTS[case]}).encode()
    )
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"].startswith("prompt"), error
    assert time.monotonic() - began < 40


def test_prompts_times_n_is_bounded(front: LiveFront) -> None:
    assert error_of(front.complete(prompt=["a"] * 13, n=10))["param"] == "n"


@pytest.mark.parametrize(
    ("field", "value"),
    [("best_of", 2), ("suffix", "x"), ("logprobs", 21), ("logprobs", True), ("echo", 1), ("max_tokens", 0)],
)
def test_a_bad_completion_field_is_named(front: LiveFront, field: str, value: object) -> None:
    response = front.complete(**{field: value})
    assert response.status_code == 400
    assert error_of(response)["param"] == field


def test_what_asks_for_nothing_is_accepted(front: LiveFront) -> None:
    calm = {
        "tools": [], "tool_choice": "none", "functions": None, "response_format": {"type": "text"},
        "modalities": ["text"], "store": False, "service_tier": "auto", "parallel_tool_calls": True,
        "user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y",
        "temperature": None, "stop": None, "n": None, "audio": None,
    }  # fmt: skip
    assert front.chat(max_tokens=1, **calm).status_code == 200
    assert front.complete(max_tokens=1, best_of=1, suffix="").status_code == 200


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "not JSON": b"hello",
    "half": b'{"model": "fa',
    "a list": b"[]",
    "null": b"null",
    "text": b'"x"',
    "invalid UTF-8": b'{"model": "fake", "prompt": "\xff\xfe"}',
    "UTF-16": '{"model": "fake", "prompt": 1}'.encode("utf-16"),
    "NaN": b'{"model": "fake", "prompt": "x", "temperature": NaN}',
    "infinity": b'{"model": "fake", "prompt": "x", "temperature": 1e999}',
    "minus infinity": b'{"model": "fake", "prompt": "x", "temperature": -Infinity}',
    "a 5,000-digit number": b'{"model": "fake", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "deep lists": b'{"model": "fake", "prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and unknown": b'{"model": "fake", "x": ' + b"[" * 500 + b"]" * 500 + b"}",
    "NUL": b"\0",
    "a name that is not Unicode": b'{"model": "fake", "\\udfff": 1}',
}


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_bad_body_is_refused(front: LiveFront, path: str, case: str) -> None:
    response = _post(front, path, BODIES[case])
    assert response.status_code == 400, response.text
    error_of(response)
    assert httpx.get(f"{front.url}/health").json()["status"] == "ok"


def test_a_declared_10_mb_body_is_refused(front: LiveFront) -> None:
    response = _post(front, "/v1/completions", b'{"prompt": "' + b"x" * 10_000_000)
    assert response.status_code == 413
    assert "1048576" in error_of(response)["message"]


def test_a_chunked_body_is_refused_before_it_ends(front: LiveFront) -> None:
    where = urlsplit(front.url)
    assert where.hostname
    assert where.port
    with socket.create_connection((where.hostname, where.port), timeout=30) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(17):  # of 64 KiB: past 1 MiB, and no end in sight
            raw.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert httpx.get(f"{front.url}/health").status_code == 200


def test_a_body_of_exactly_the_limit_is_read(front: LiveFront) -> None:
    empty = json.dumps({"model": "no", "prompt": ""}).encode()
    padding = b" " * (2**20 - len(empty))
    assert _post(front, "/v1/completions", empty + padding).status_code == 404
    assert _post(front, "/v1/completions", empty + padding + b" ").status_code == 413


def test_broken_http_does_not_hurt(front: LiveFront) -> None:
    where = urlsplit(front.url)
    assert where.hostname
    assert where.port
    for junk in (
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    ):
        with socket.create_connection((where.hostname, where.port), timeout=30) as raw:
            raw.sendall(junk)
            raw.shutdown(socket.SHUT_WR)
            assert raw.recv(4096)[:12] in (b"HTTP/1.1 400", b"")
    assert httpx.get(f"{front.url}/health").status_code == 200


def test_request_ids(front: LiveFront) -> None:
    given = httpx.get(f"{front.url}/version", headers={"x-request-id": "trace-1:a/b"})
    assert given.headers["x-request-id"] == "trace-1:a/b"
    assert front.logged("id=trace-1:a/b ")
    for bad in ("two words", "x" * 129, 'a"b', "a\tb"):
        answer = httpx.get(f"{front.url}/version", headers={"x-request-id": bad})
        assert answer.headers["x-request-id"] != bad
        assert len(answer.headers["x-request-id"]) == 32
