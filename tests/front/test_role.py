"""One server reads a prompt, another one answers: what they tell each other, and what a fault costs."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from services.contract.errors import SetupError
from services.decoder.front.role import PrefillNode
from services.decoder.settings import DecoderSettings
from tests.front.live import chat_body, live_front

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
