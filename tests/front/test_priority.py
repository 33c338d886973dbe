"""Who may ask to run before others: nobody, those with a key for it, or all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.front.live import LiveFront, chat_body, error_of, live_front


def ask(
    front: LiveFront, priority: int | None, key: str = "", path: str = "chat/completions"
) -> httpx.Response:
    fields: dict[str, Any] = {"max_tokens": 1, "priority": priority}
    body = chat_body(**fields) if path.startswith("chat") else {"model": "fake", "prompt": "Hi"} | fields
    return front.post(f"/v1/{path}", body, headers={"authorization": f"Bearer {key}"} if key else {})


def refused(response: httpx.Response, lowest: int) -> bool:
    if response.status_code == 200:
        return False
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (403, "priority", "priority_not_allowed")
    assert f"{lowest} is the lowest" in error["message"]
    return True


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_by_default_one_may_step_back_and_not_ahead(front: LiveFront, path: str) -> None:
    for allowed in (None, 0, 1, 2**31 - 1):
        assert ask(front, allowed, path=path).status_code == 200
    submitted = len(front.noted("submit"))
    for urgent in (-1, -(2**31)):
        assert refused(ask(front, urgent, path=path), 0)
        assert refused(ask(front, urgent, "whatever", path=path), 0), "a key that nobody set lifts nothing"
    assert len(front.noted("submit")) == submitted


def test_a_key_for_it_lifts_the_limit_and_others_do_not(default_model: Path) -> None:
    with live_front(default_model, "--api-keys=sesame", "--urgent-keys=now", "--most-urgent=-3") as front:
        assert not refused(ask(front, -(2**31), "now"), -3)
        assert front.noted("submit")[-1]["priority"] == -(2**31)
        assert not refused(ask(front, -3, "sesame"), -3)
        assert refused(ask(front, -4, "sesame"), -3)
        assert ask(front, 0).status_code == ask(front, 0, "wrong").status_code == 401
        named = {"authorization": "Basic now"}
        assert front.post("/v1/chat/completions", chat_body(priority=-4), headers=named).status_code == 401


def test_with_keys_for_it_alone_the_server_is_open_and_prefixes_are_everybodys(default_model: Path) -> None:
    with live_front(default_model, "--urgent-keys=now") as front:
        assert not refused(ask(front, -1, "now"), 0)
        assert refused(ask(front, -1), 0)
        assert ask(front, 0).status_code == 200
        assert {said.get("cache_salt", "") for said in front.noted("submit")} == {""}
