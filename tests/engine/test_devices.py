"""A device that is not there, or that the kernels cannot run on, is refused with what to do."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from services.contract.errors import SetupError
from services.decoder.engine import assembly
from services.decoder.engine.__main__ import load
from services.decoder.engine.assembly import check_device
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.own_device import keep_to
from services.decoder.engine.servicer import EngineServicer
from services.decoder.engine.settings import EngineSettings
from services.decoder.settings import DecoderSettings


def pretend(monkeypatch: pytest.MonkeyPatch, *, count: int, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old Card")


def test_the_cpu_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=0)
    check_device(torch.device("cpu"))


@pytest.mark.parametrize(("name", "count"), [("cuda:0", 0), ("cuda:2", 2)])
def test_no_such_gpu(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    pretend(monkeypatch, count=count)
    with pytest.raises(SetupError, match=rf"there is no {name}: .* sees {count} GPUs; .*--device cpu"):
        check_device(torch.device(name))


def test_a_card_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=1, capability=(7, 5))
    with pytest.raises(SetupError, match=r"Old Card has compute capability 7\.5; .*--device cpu"):
        check_device(torch.device("cuda:0"))


def test_the_gpu_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"cuda:0 needs cuda\.core: pip install 'hotset\[gpu\]'"):
        check_device(torch.device("cuda:0"))


def test_a_card_that_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, count=1)
    check_device(torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("device", "shown", "now", "left"),
    [
        ("cuda:0", None, "cuda:0", "0"),
        ("cuda:3", None, "cuda:0", "3"),
        ("cuda:1", "4,7", "cuda:0", "7"),
        ("cuda:1", "GPU-8f, GPU-2c", "cuda:0", "GPU-2c"),
        ("cuda", "4,7", "cuda", "4,7"),
        ("auto", None, "auto", None),
        ("cpu", None, "cpu", None),
    ],
)
def test_an_engine_sees_its_own_gpu_alone(device: str, shown: str | None, now: str, left: str | None) -> None:
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert keep_to(device, environment) == now
    assert environment.get("CUDA_VISIBLE_DEVICES") == left


def test_a_gpu_that_the_environment_hides_is_refused() -> None:
    with pytest.raises(SetupError, match=r"no cuda:2: CUDA_VISIBLE_DEVICES=4,7 shows 2 GPUs"):
        keep_to("cuda:2", {"CUDA_VISIBLE_DEVICES": "4,7"})


def test_an_engine_starts_on_the_gpu_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it names another current device, so it is the only one there is."""
    seen: list[tuple[str, str, str | None]] = []

    def check(device: torch.device, asked: str) -> None:
        seen.append((str(device), asked, os.environ.get("CUDA_VISIBLE_DEVICES")))
        raise SetupError("far enough")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setattr(assembly, "check_device", check)
    settings = EngineSettings.model_validate(
        {"model": tmp_path, "device": "cuda:1", "engine_socket": tmp_path / "socket"}
    )
    store: Any = None
    with pytest.raises(SetupError, match="far enough"):
        load(settings, store, EngineServicer(), threading.Event())
    assert seen == [("cuda:0", "cuda:1", "6")]


def test_an_engine_without_services_makes_its_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def current(device: torch.device) -> None:
        raise SetupError(f"current: {device}")

    monkeypatch.setattr(torch.cuda, "set_device", current)
    with pytest.raises(SetupError, match="current: cuda:1"):
        OfflineEngine(DecoderSettings.model_validate({"model": "m", "device": "cuda:1"}), 2**20)


def test_a_cpu_engine_needs_no_gpu_extra() -> None:
    """As after `make run` on a machine without a card: all that a start imports, with `cuda` nowhere."""
    program = """
import sys
sys.modules["cuda"] = None
import services.decoder.engine.__main__
import services.decoder.engine.assembly
import services.decoder.engine.loop
import services.decoder.engine.offline
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
