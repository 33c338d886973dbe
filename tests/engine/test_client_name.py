"""Engines' names at their store: their own, the same in every life, and ones that a store takes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.decoder.engine.client_name import client_name
from services.decoder.engine.settings import EngineSettings
from services.kvstore.orders import _NAME


def name(directory: str = "/tmp/hotset-a", **fields: object) -> str:
    given = {"model": Path("/m"), "engine_socket": Path(directory) / "engine00-1.sock"} | fields
    return client_name(EngineSettings.model_validate(given))


def test_engines_of_a_front_of_two_fronts_and_of_two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1")
    assert name() == "engine-0@node-1:8000"
    names = {name(), name(engine_index=1), name(port=8001), name(port=0), name("/tmp/hotset-b", port=0)}
    monkeypatch.setattr(socket, "gethostname", lambda: "node-2")
    assert len(names | {name()}) == 6


def test_a_later_life_has_the_same(tmp_path: Path) -> None:
    later = tmp_path / "engine00-2.sock"  # as the supervisor calls it
    for port in (0, 8000):
        assert name(str(tmp_path), port=port) == name(str(tmp_path), port=port, engine_socket=later)


@pytest.mark.parametrize("machine", ["my_laptop", "", "é", "x" * 300])
def test_machines_with_odd_names(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: machine)
    assert _NAME.fullmatch(name(engine_index=1023, port=65535))
