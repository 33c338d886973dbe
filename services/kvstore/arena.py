"""The arena file: made or reopened, locked, mapped, laid out, removed.

Knows where headers lie and that pages exist; who holds a page is pages.py's affair.
One process holds the arena at a time, by a lock on the file itself. A reopened file is never truncated.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from services.contract.byte_size import format_bytes
from services.contract.errors import SetupError
from services.contract.file_header import (
    FileHeader,
    HeaderCounters,
    blank_file_header,
    read_file_header,
    write_file_header,
)
from services.contract.file_lock import FileLock
from services.contract.layout import ArenaLayout
from services.contract.mount import mount_of
from services.contract.page_header import PAGE_HEADER

ARENA_NAME = "arena.bin"
_MADE_MARK = "made-by-kvstore"
"""Lies in a directory that a kvstore made, so that a later one knows it may remove it."""

PageHeaders = npt.NDArray[Any]


class Arena:
    """An open arena; build one with `Arena.open`. Used from one thread, until `close`."""

    def __init__(self, lock: FileLock, buffer: memoryview, *, reopened: bool) -> None:
        self._lock = lock
        self.buffer = buffer
        self._counters = HeaderCounters(buffer)
        self.path = lock.path
        self.arena_bytes = len(buffer)
        self.reopened = reopened
        self.header = read_file_header(buffer)
        self.layout = (
            None
            if self.header is None
            else ArenaLayout.fit(self.arena_bytes, self.header.page_tokens, self.header.planes)
        )

    @classmethod
    def open(cls, directory: Path, arena_bytes: int) -> Self:
        """Make or reopen `directory`/arena.bin of `arena_bytes`, and lock it.

        Raises:
            SetupError: not a tmpfs, no room on it, no permission, held by another kvstore, or a file of
                another length or layout version, or damaged. A file that was there is left as it was.
        """
        directory = directory.absolute()
        try:
            _make_directory(directory)
            try:
                return cls._open_in(directory, arena_bytes)
            except BaseException:
                _remove_directory(directory)
                raise
        except PermissionError as error:
            raise SetupError(
                f"{error.filename or directory}: {error.strerror}; choose a directory this user can write "
                f"with --arena-dir, or give it this one: chown -R {os.geteuid()} {directory}"
            ) from error
        except OSError as error:
            raise SetupError(
                f"{error.filename or directory}: {error.strerror}; "
                "choose a directory this user can write with --arena-dir"
            ) from error

    @classmethod
    def _open_in(cls, directory: Path, arena_bytes: int) -> Self:
        mount = mount_of(directory)
        if mount.file_system != "tmpfs":
            raise SetupError(
                f"{directory} lies on {mount.file_system}, and an arena must lie in memory; name a directory "
                "below /dev/shm with --arena-dir, or mount one: "
                f"mount -t tmpfs -o size={arena_bytes},huge=advise tmpfs {directory}"
            )
        lock = FileLock(directory / ARENA_NAME)
        if not lock.acquire():
            raise SetupError(
                f"another kvstore holds {lock.path}; stop it, or give this one its own --arena-dir"
            )
        found = lock.path.stat()
        reopened = found.st_size > 0
        try:
            if reopened and found.st_size != arena_bytes:
                raise SetupError(
                    f"{lock.path} has {found.st_size} bytes and --arena-bytes asks for {arena_bytes}; "
                    f"start with --arena-bytes {found.st_size}, or delete the file to start empty"
                )
            lacking = arena_bytes - found.st_blocks * 512
            if lacking > mount.free_bytes:
                raise SetupError(
                    f"the arena needs {format_bytes(lacking)} more and the tmpfs of {directory} has only "
                    f"{format_bytes(mount.free_bytes)}; start with a smaller --arena-bytes, or enlarge it: "
                    f"{mount.enlarged(lacking)} (of a container's volume: size= in its options)"
                )
            return cls(lock, _map(lock.path, arena_bytes), reopened=reopened)
        except BaseException:
            lock.release(remove=not reopened)
            raise

    def lay_out(self, header: FileHeader) -> ArenaLayout:
        """Place the pages that `header` describes, all free; the pages of an earlier layout are gone.

        Their generations go on growing: every page starts at the greatest there ever was. Killed half-way,
        the file reads as not laid out, and the floor is in it already.

        Raises:
            InvalidRequest, SetupError: the header does not fit the file; nothing has changed.
        """
        header.describe()
        layout = ArenaLayout.fit(self.arena_bytes, header.page_tokens, header.planes)
        if self.layout is not None:
            greatest = int(self.page_headers()["generation"].max())
            self._counters.generation_floor = max(self._counters.generation_floor, greatest)
        blank_file_header(self.buffer)
        self.header, self.layout = header, layout
        headers = self.page_headers()
        headers.view(np.uint8)[:] = 0
        headers["generation"] = self._counters.generation_floor
        write_file_header(self.buffer, header)
        return layout

    def page_headers(self) -> PageHeaders:
        """The headers in the file, `[pages]` of PAGE_HEADER; writes go to the file.

        Raises:
            SetupError: the arena is not laid out yet.
        """
        if self.layout is None:
            raise SetupError("the arena is not laid out yet; a client must attach first")
        offset = self.layout.page_headers_offset
        length = self.layout.page_count * PAGE_HEADER.itemsize
        return np.frombuffer(self.buffer[offset : offset + length], PAGE_HEADER)

    def next_epoch(self) -> int:
        """A number greater than every one before it, in this and earlier lives of the store."""
        self._counters.epoch += 1
        return self._counters.epoch

    @property
    def resident_bytes(self) -> int:
        """Bytes of the file that lie in memory, now.

        Raises:
            SetupError: someone removed the file, so that no client can map it any more.
        """
        try:
            return self.path.stat().st_blocks * 512
        except FileNotFoundError as error:
            raise SetupError(f"{self.path} was removed while kvstore ran; start it again") from error

    def close(self, *, keep: bool) -> None:
        """Let go of the file; remove it, and a directory that a kvstore made, unless `keep`. Idempotent.

        The mapping goes when the last view of it does.
        """
        self._lock.release(remove=not keep)
        if not keep:
            _remove_directory(self.path.parent)


def _map(path: Path, arena_bytes: int) -> memoryview:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, arena_bytes)  # sparse: memory is taken as pages are first written
        return memoryview(mmap.mmap(descriptor, arena_bytes))
    finally:
        os.close(descriptor)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return
    (directory / _MADE_MARK).touch(mode=0o600)


def _remove_directory(directory: Path) -> None:
    """Remove `directory` if a kvstore made it and nothing but its mark is left in it."""
    mark = directory / _MADE_MARK
    if mark.exists() and [entry.name for entry in directory.iterdir()] == [_MADE_MARK]:
        mark.unlink()
        directory.rmdir()
