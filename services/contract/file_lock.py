"""A lock that the kernel drops when its holder dies, across containers that share the file system.

Knows nothing of sessions or arenas. Both use it: kvstore holds one on its arena, a mapped client one on
its session file, and the store takes a free session lock as proof that the client's process is gone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """An exclusive `flock` on `path`, held until `release` or the end of the process.

    The descriptor is close-on-exec, so a child started by exec does not keep the lock alive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take the lock without waiting, creating the file; False if another process holds it.

        Raises:
            OSError: the file cannot be created or opened.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self, *, remove: bool = True) -> None:
        """Give the lock back, and its file too unless `remove` is False. Idempotent."""
        if self._descriptor is None:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
