"""A directory of one run on the tmpfs, for kvstore's arena: made, removed at the end, swept if left behind.

Knows nothing of what lies in it. A run that was killed leaves its directory; the next run finds that
nobody holds its lock any more and removes it.
"""

from __future__ import annotations

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
        self._lock = _lock(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)


def sweep(parent: Path) -> None:
    """Remove what dead runs of this user left in `parent`."""
    for path in parent.glob(f"{PREFIX}*"):
        if path.stat().st_uid == os.getuid() and (path / _LOCK).exists():
            lock = _lock(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _lock(directory: Path) -> int | None:
    """A descriptor that holds the directory's lock, or None if a living run does."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
