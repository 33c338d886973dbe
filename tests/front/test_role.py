"""One server reads a prompt, another one answers: what they tell each other, and what a fault costs."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from services.contract.errors import SetupError
from services.decoder.front.role import PrefillNode
from services.decoder.settings import DecoderSettings
from tests.front.live import PATIENCE_SECONDS, chat_body, error_of, live_front

LONG = {"role": "user", "content": "one two three four five six seven eight nine ten " * 10}
KEYS = ("--api-keys=sesame", "--api-keys=other")
SESAME = {"authorization": "Bearer sesame"}


def test_the_prompt_is_read_there_first_and_answered_here(default_model: Path) -> None:
    with live_front(default_model, "--prefill-only", *KEYS) as there:
        flags = (f"--decode-from={there.url}", *KEYS)
        with live_front(default_model, *flags) as here:
            body = chat_body(messages=[LONG], max_tokens=5)
            assert here.post("/v1/chat/completions", body, headers=SESAME).is_success
            (read,), (answered,) = there.noted("submit"), here.noted("submit")
            assert read["max_tokens"] == 1
            assert answered["max_tokens"] == 5
            for name in ("prompt_tokens", "cache_salt"):  # so that the same pages are meant
                assert read[name] == answered[name]
            assert here.post("/v1/chat/completions", body | {"cache_salt": "a"}, headers=SESAME).is_success
            assert there.noted("submit")[1]["cache_salt"] == here.noted("submit")[1]["cache_salt"]
            assert here.post("/v1/chat/completions", chat_body(max_tokens=5), headers=SESAME).is_success
            assert len(there.noted("submit")) == 2, "a prompt without a full page is nothing to hand over"

            refused = there.post("/v1/chat/completions", body, headers=SESAME)
            assert refused.status_code == 400
            assert "--prefill-only" in refused.json()["error"]["message"]

            there.process.kill()
            there.process.wait()
            assert here.post("/v1/chat/completions", body, headers=SESAME).is_success
            assert "event=prefill_failed" in here.log


async def _read(node: PrefillNode) -> float:
    began = time.monotonic()
    await node.read([[1] * 100], None, "")
    return time.monotonic() - began


def test_a_node_that_says_nothing_is_waited_for_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        node = PrefillNode(url, "fake", 0.3, 64)
        assert 0.3 <= asyncio.run(_read(node)) < 60
        assert "prefill_failed" in caplog.text
        caplog.clear()
        asyncio.run(_read(node))
        assert not caplog.text, "it is left alone for a while"


def test_only_a_node_that_cannot_be_had_is_left_alone(
    default_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with live_front(default_model, "--prefill-only") as there:
        node = PrefillNode(there.url, "another", 60.0, 64)
        asyncio.run(_read(node))
        assert "it answered 404" in caplog.text
        caplog.clear()
        asyncio.run(_read(node))
        assert "it answered 404" in caplog.text, "another request may be one that it takes"


@contextmanager
def _silent() -> Iterator[tuple[str, Callable[[], socket.socket]]]:
    """A server that takes connections and says nothing: its URL, and what waits for the next connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_SECONDS)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", lambda: listening.accept()[0]


def _until_hung_up(connection: socket.socket) -> None:
    connection.settimeout(PATIENCE_SECONDS)
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass


def test_what_will_be_refused_here_is_not_read_there(default_model: Path) -> None:
    with (
        live_front(default_model, "--prefill-only") as there,
        live_front(default_model, f"--decode-from={there.url}") as here,
    ):
        answer = here.post("/v1/completions", {"model": "fake", "prompt": [5] * 200, "max_tokens": 4000})
        assert error_of(answer)["code"] == "context_length_exceeded"
        assert not there.noted("submit")


def test_a_client_that_leaves_takes_the_reading_along(default_model: Path) -> None:
    with _silent() as (url, connection), live_front(default_model, f"--decode-from={url}") as here:
        client = http.client.HTTPConnection(here.url.removeprefix("http://"))
        body = json.dumps(chat_body(messages=[LONG], max_tokens=5))
        client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        with connection() as reading:
            client.close()
            _until_hung_up(reading)


def test_readings_hold_nobody_up_and_end_with_the_server(default_model: Path) -> None:
    with _silent() as (url, connection), ExitStack() as stack:
        flags = (f"--decode-from={url}", "--prefill-seconds=600", "--shutdown-seconds=0.5")
        here = stack.enter_context(live_front(default_model, *flags))
        pool = stack.enter_context(ThreadPoolExecutor(64))
        body = chat_body(messages=[LONG], max_tokens=5)
        asked = [pool.submit(here.post, "/v1/chat/completions", body) for _ in range(50)]
        for _ in asked:
            stack.enter_context(connection())
        assert here.post("/tokenize", {"prompt": "hi"}).is_success, "threads are for text"
        os.kill(here.process.pid, signal.SIGTERM)
        assert {error_of(answer.result())["code"] for answer in asked} == {"shutting_down"}
        assert here.until_exit() == 0


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"decode_from": "10.0.0.1:8000"}, "decode.from"),
        ({"prefill_only": True, "decode_from": "http://a:1"}, "prefill_only"),
        ({"prefill_only": True, "prefix_cache": False}, "prefix_cache"),
    ],
)
def test_roles_that_cannot_be(flags: dict[str, object], match: str) -> None:
    with pytest.raises((SetupError, ValueError), match=match):
        DecoderSettings.model_validate({"model": "/nowhere", **flags})
