"""Directories on a tmpfs and processes that are cleared away, whatever a test does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.engine.processes import Process

_P = TypeVar("_P", bound=Process)
Keep = Callable[[_P], _P]


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory below /dev/shm that is gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="hotset-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def keep() -> Iterator[Callable[[_P], _P]]:
    """`keep(process)` returns it and clears it away at the end of the test, the last one first."""
    kept: list[Process] = []

    def add(process: _P) -> _P:
        kept.append(process)
        return process

    yield add
    for process in reversed(kept):
        process.clear_away()
