"""A lock that the kernel drops when its holder dies, across containers that share the file system.

Knows nothing of sessions or arenas. Both use it: kvstore holds one on its arena, a mapped client one on
its session file, and the store takes a free session lock as proof that the client's process is gone.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_ATTEMPTS = 6
_PAUSE_SECONDS = 0.01


class FileLock:
    """An exclusive `flock` on `path`, held until `release` or the end of the process.

    The descriptor is close-on-exec, so a child started by exec does not keep the lock alive; a forked one
    does, which is right, because it also keeps the mapping.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock, creating the file; False if another holder keeps it. Idempotent.

        A holder is looked at again for 50 ms, because `reap` holds a free lock for an instant.

        Raises:
            OSError: the file cannot be created or opened.
        """
        for attempt in range(_ATTEMPTS):
            if self._descriptor is not None:
                return True
            if attempt:
                time.sleep(_PAUSE_SECONDS)
            self._descriptor = _try_lock(self.path, os.O_CREAT)
        return self._descriptor is not None

    def release(self, *, remove: bool = True) -> None:
        """Give the lock back, and its file too unless `remove` is False. Idempotent."""
        if self._descriptor is None:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None


def reap(path: Path) -> bool:
    """Remove the lock file at `path` if nobody holds it; False, at once, if somebody does.

    A missing file counts as held by nobody: its holder removed it.

    Raises:
        OSError: the file cannot be opened or removed.
    """
    try:
        descriptor = _try_lock(path, 0)
    except FileNotFoundError:
        return True
    if descriptor is None:
        return False
    path.unlink(missing_ok=True)
    os.close(descriptor)
    return True


def _try_lock(path: Path, flags: int) -> int | None:
    """A descriptor that holds the lock on the file now at `path`, or None if another one does."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        # The last holder removed the file between our open and our lock: we hold a file without a name.
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
