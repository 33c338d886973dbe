"""A directory of one run on the tmpfs, for kvstore's arena: made, removed at the end, swept if left behind.

Knows nothing of what lies in it. A run that was killed leaves its directory; the next run finds that
nobody holds its lock any more and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

TMPFS = Path("/dev/shm")  # memory on purpose: decoders map the arena
PREFIX = "hotset-run-"
_LOCK = "run.lock"


class ArenaDirectory:
    """Use as a context; `path` is the directory, private to this user."""

    def __init__(self, parent: Path = TMPFS) -> None:
        self._parent = parent

    def __enter__(self) -> ArenaDirectory:
        """Make it, after sweeping those of dead runs.

        Raises:
            OSError: the parent is missing or not writable.
        """
        sweep(self._parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
        # Locked before it has its name: others sweep a directory whose lock can be had.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = _lock(unnamed)
        unnamed.rename(self.path / _LOCK)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def sweep(parent: Path) -> None:
    """Remove what dead runs of this user left in `parent`."""
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # a run that ends removes its own meanwhile
            if path.stat().st_uid == os.getuid() and (path / _LOCK).exists():
                lock = _lock(path / _LOCK)
                if lock is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock at `path`, or None if a living run does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
