"""Directories on a tmpfs and processes that are cleared away, whatever a test does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.processes import Keeper


@contextmanager
def directory_on_tmpfs() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="hotset-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory below /dev/shm that is gone afterwards."""
    with directory_on_tmpfs() as directory:
        yield directory


@pytest.fixture(scope="module")
def module_shm() -> Iterator[Path]:
    """The same, for all tests of a file."""
    with directory_on_tmpfs() as directory:
        yield directory


@pytest.fixture
def keep(shm: Path) -> Iterator[Keeper]:
    """Clears away at the end of the test what was given to it, before its directory goes."""
    keeper = Keeper()
    yield keeper
    keeper.clear_away()


@pytest.fixture(scope="module")
def module_keep(module_shm: Path) -> Iterator[Keeper]:
    """The same, for all tests of a file."""
    keeper = Keeper()
    yield keeper
    keeper.clear_away()
