"""A client that leaves takes its request along: the engine is told, whatever was going on."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.front.live import LiveFront, chat_body, orders, until


def _send(front: LiveFront, path: str, body: dict[str, Any], request_id: str = "leaver") -> socket.socket:
    where = urlsplit(front.url)
    assert where.hostname
    assert where.port
    raw = socket.create_connection((where.hostname, where.port), timeout=30)
    content = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        f"x-request-id: {request_id}",
        f"content-length: {len(content)}",
    ]
    head = "\r\n".join([*lines, "content-type: application/json", "", ""])
    raw.sendall(head.encode() + content)
    return raw


def _until_idle(front: LiveFront) -> None:
    def idle() -> bool:
        return 'hotset_requests_running{engine="0"} 0.0' in httpx.get(f"{front.url}/metrics").text

    until(idle, "the engine to have nothing to do")


def _aborted(front: LiveFront, request_id: str) -> bool:
    return any(abort["request_id"] == request_id for abort in front.noted("abort"))


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("stream", "hold"),
    [(True, False), (True, True), (False, False), (False, True)],
    ids=["after the first byte", "streamed and queued", "while the whole is made", "queued"],
)
def test_a_client_leaves(front: LiveFront, stream: bool, hold: bool, n: int, reset: bool) -> None:
    before = len(front.noted("submit"))
    body = chat_body(stream=stream, n=n, cache_salt=orders(hold=hold, pause=0.01))
    leaver = f"leaver-{before}-{reset:d}"
    with closing(_send(front, "/v1/chat/completions", body, leaver)) as raw:
        until(lambda: len(front.noted("submit")) > before, "the request to reach the engine")
        if stream:
            assert raw.recv(4096).startswith(b"HTTP/1.1 200")
        if reset:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    request_id = front.noted("submit")[-1]["request_id"]
    until(lambda: _aborted(front, request_id), "the engine to be told")
    _until_idle(front)
    lines = front.logged(f"id={leaver} ")
    assert "status=499" in lines[-1]
    assert f"finish={','.join(['abort'] * n)}" in lines[-1]
    assert front.chat(max_tokens=1).status_code == 200


def test_several_prompts_are_all_aborted(front: LiveFront) -> None:
    before = len(front.noted("submit"))
    body = {"model": "fake", "prompt": ["a", "b", "c"], "cache_salt": orders(hold=True)}
    with closing(_send(front, "/v1/completions", body)):
        until(lambda: len(front.noted("submit")) == before + 3, "all prompts to reach the engine")
    for submitted in front.noted("submit")[before:]:
        until(lambda wanted=submitted["request_id"]: _aborted(front, wanted), "the engine to be told", 5)  # type: ignore[misc]  # mypy cannot type a default of a lambda
    _until_idle(front)


def test_a_client_that_leaves_within_its_body_is_forgotten(front: LiveFront) -> None:
    where = urlsplit(front.url)
    assert where.hostname
    assert where.port
    before = len(front.noted("submit"))
    with socket.create_connection((where.hostname, where.port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\nx-request-id: halfway\r\n"
            b'content-type: application/json\r\n\r\n{"model": "fake", "prom'
        )
    until(lambda: "id=halfway" in front.log, "the request to end")
    assert "Traceback" not in front.log.split("id=halfway")[0][-2000:]
    assert len(front.noted("submit")) == before


def test_a_client_that_stays_is_not_aborted(front: LiveFront) -> None:
    assert front.chat(max_tokens=3, stream=True).text.endswith("data: [DONE]\n\n")
    request_id = front.noted("submit")[-1]["request_id"]
    assert front.chat(max_tokens=3).status_code == 200
    assert not _aborted(front, request_id)
