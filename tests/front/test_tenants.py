"""Computed prefixes are shared inside one API key and one cache_salt, and nowhere else."""

from __future__ import annotations

from pathlib import Path

from tests.front.live import LiveFront, chat_body, live_front


def salt(front: LiveFront, key: str, **fields: object) -> str:
    """What the engine is told, as the journal keeps bytes."""
    headers = {"authorization": f"Bearer {key}"}
    assert front.post("/v1/chat/completions", chat_body(max_tokens=2, **fields), headers=headers).is_success
    return str(front.noted("submit")[-1].get("cache_salt", ""))


def test_the_salt_is_the_keys_and_the_clients(default_model: Path) -> None:
    with live_front(default_model, "--api-keys=sesame", "--api-keys=other") as front:
        mine, again, others = salt(front, "sesame"), salt(front, "sesame"), salt(front, "other")
        salted = salt(front, "sesame", cache_salt="a")
    assert mine == again
    assert len({mine, others, salted}) == 3
    assert "sesame" not in mine


def test_without_keys_only_the_clients_salt_counts(front: LiveFront) -> None:
    assert salt(front, "whatever") == salt(front, "else") == ""
    assert salt(front, "whatever", cache_salt="a") == salt(front, "else", cache_salt="a") != ""
