"""Pages go back when nothing can write them any more, however a loop ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.contract.errors import SetupError
from services.decoder.engine import __main__ as engine
from tests.engine.processes import eventually


class Rig:
    """`serve` on its thread, with a loop and a runner that do what the test says."""

    def __init__(
        self, patch: pytest.MonkeyPatch, run: Callable[[], None], wait: Callable[[], None] = lambda: None
    ) -> None:
        self.closed = 0
        self.writing, self.ended = threading.Event(), threading.Event()
        self.failure: list[SetupError] = []
        served = SimpleNamespace(loop=SimpleNamespace(run=run), runner=SimpleNamespace(wait=wait))
        patch.setattr(engine, "load", lambda *_: served)
        settings: Any = SimpleNamespace(engine_socket="nowhere")
        servicer: Any = SimpleNamespace(serve=lambda served: None)
        given = (settings, self.store, servicer, self.ended, self.failure, self.writing)
        self.thread = threading.Thread(target=engine.serve, args=given, daemon=True)
        self.thread.start()

    @property
    def store(self) -> Any:
        def close() -> None:
            self.closed += 1

        return SimpleNamespace(close=close)

    def leave(self) -> int:
        """Times that the session is closed by that."""
        engine.close(self.store, self.writing)
        return self.closed


def test_a_step_that_does_not_end_keeps_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    rig = Rig(monkeypatch, lambda: (go.wait(), None)[1])
    eventually("it steps", rig.writing.is_set)
    assert rig.leave() == 0
    go.set()
    rig.thread.join()
    assert rig.leave() == 1


def test_a_loop_that_fails_waits_for_what_it_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def run() -> None:
        raise SetupError("the store came back with another arena")

    rig = Rig(monkeypatch, run, lambda: waited.append(1))
    rig.thread.join()
    assert [str(error) for error in rig.failure] == ["the store came back with another arena"]
    assert waited == [1]
    assert rig.leave() == 1


def test_a_device_that_answers_nothing_any_more_keeps_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    rig = Rig(monkeypatch, fails, fails)
    rig.thread.join()
    assert len(rig.failure) == 1
    assert rig.leave() == 0
