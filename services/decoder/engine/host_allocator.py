"""The C library's allocator, told to keep what is freed.

Knows nothing of what is allocated. A step of several rows frees tens of megabytes of temporaries; glibc gives
them back to the system and faults them in anew at the next step, which cost more than half of a step of eight
rows (docs/log.md). Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_TRIM_BYTES = 2**30
_MMAP_BYTES = 2**25  # the most that glibc takes


def keep_freed_memory() -> None:
    """For the whole process, from now on; up to 1 GiB of freed memory stays with it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
