"""The lock files by which mapped clients show that they live: `<arena_dir>/sessions/<token>.lock`.

Knows tokens and files, no pages. A client locks its file before it attaches; the kernel drops the lock when
the process is gone, whatever it was doing, and never before: a stopped or hung client keeps it.
"""

from __future__ import annotations

from pathlib import Path

from services.contract.errors import SetupError
from services.contract.file_lock import reap

_SUFFIX = ".lock"


class SessionLocks:
    """The directory of lock files. Tokens are checked 32 hex digits (orders.py) before they come here."""

    def __init__(self, directory: Path) -> None:
        """Make `directory` if it is missing.

        Raises:
            SetupError: it cannot be made.
        """
        self._directory = directory
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"{directory}: {error.strerror}; mend it or choose another --arena-dir"
            ) from error

    def reap(self, token: str) -> bool:
        """Whether the client with `token` is gone; its file is removed then. Never waits.

        Raises:
            SetupError: its file is not one that can be opened, so nobody can say.
        """
        return _reap(self._directory / f"{token}{_SUFFIX}")

    def survey(self) -> tuple[list[str], list[str]]:
        """Tokens of the clients that live, and of those that are gone, whose files are removed.

        Raises:
            SetupError: as `reap`.
        """
        living: list[str] = []
        gone: list[str] = []
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            (gone if _reap(path) else living).append(path.name.removesuffix(_SUFFIX))
        return living, gone

    def remove(self) -> None:
        """Remove the directory and the files in it: the arena that they speak of is gone."""
        for path in self._directory.glob(f"*{_SUFFIX}"):
            path.unlink(missing_ok=True)
        if not any(self._directory.iterdir()):
            self._directory.rmdir()


def _reap(path: Path) -> bool:
    try:
        return reap(path)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}; remove it, or make it this user's") from error
