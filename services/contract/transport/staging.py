"""Buffers that messages are built in and land in, used again and again.

Knows sizes only. A buffer is anonymous memory of its own: what a stopped peer may still write into a buffer
that was given up hits this buffer and nothing else, because it is dropped, never handed out again.
"""

from __future__ import annotations

import mmap

SMALLEST_BYTES = 64 * 1024
KEPT_BYTES = 64 * 2**20


class Staging:
    """A pool of one thread."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        """Keep `kept_bytes` of unused buffers at most."""
        self._kept_bytes = kept_bytes
        self._free: dict[int, list[memoryview]] = {}
        self._free_bytes = 0
        self.taken_bytes = 0

    def take(self, length: int) -> memoryview:
        """A writable buffer of at least `length` bytes, the caller's until `give` or `drop`."""
        size = max(SMALLEST_BYTES, 1 << (length - 1).bit_length())
        self.taken_bytes += size
        kept = self._free.get(size)
        if kept:
            self._free_bytes -= size
            return kept.pop()
        return memoryview(mmap.mmap(-1, size))

    def give(self, buffer: memoryview) -> None:
        """Take back a buffer that nobody reads or writes any more."""
        size = len(buffer)
        self.taken_bytes -= size
        if self._free_bytes + size <= self._kept_bytes:
            self._free_bytes += size
            self._free.setdefault(size, []).append(buffer)

    def drop(self, buffer: memoryview) -> None:
        """Give up a buffer that a peer may still write; it goes when its last view does."""
        self.taken_bytes -= len(buffer)
