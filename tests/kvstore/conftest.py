from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvstore.world import World


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory on a tmpfs that is gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="hotset-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def world(shm: Path) -> Iterator[World]:
    """A store with its clock and its clients' locks, checked for integrity at the end."""
    made = World(shm / "arena")
    yield made
    made.end()
