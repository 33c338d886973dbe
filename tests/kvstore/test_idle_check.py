"""The store's books are checked once it has come to rest, and a breach is logged and counted."""

from __future__ import annotations

import logging

import pytest

from services.contract.errors import HotsetError
from services.kvstore.idle_check import IdleCheck
from tests.kvstore.world import World


def test_checked_once_after_every_rest(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = 0

    def count() -> None:
        nonlocal checks
        checks += 1

    monkeypatch.setattr(world.store, "check_integrity", count)
    idle = IdleCheck(world.store, lambda: None)

    def rest(beats: int = 20) -> int:
        for _ in range(beats):
            idle.beat(world.store.snapshot())
        return checks

    assert rest() == 1, "nothing but an empty store"
    client = world.client("engine-0")
    client.attach()
    client.update(allocate=3)
    before = checks
    assert rest() == before, "a page is held"
    client.detach()
    before = checks
    assert rest(3) == before, "it has just happened"
    assert rest() == before + 1


def test_a_breach_is_logged_and_counted_and_the_store_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise HotsetError("page table: a page is free twice")

    breaches: list[int] = []
    monkeypatch.setattr(world.store, "check_integrity", broken)
    with caplog.at_level(logging.ERROR):
        IdleCheck(world.store, lambda: breaches.append(1)).check()
    monkeypatch.undo()
    assert breaches == [1]
    assert "integrity_violated what='page table: a page is free twice'" in caplog.text
