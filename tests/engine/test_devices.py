"""A device that is not there, or that the kernels cannot run on, is refused with what to do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from services.contract.errors import SetupError
from services.decoder.engine.assembly import check_device


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
