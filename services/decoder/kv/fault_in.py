"""Brings the pages of a mapping into memory by several threads, so that registering finds them there.

A fault zeroes its page. Left to the driver, which has one thread, 48 GiB take half a minute.
Knows addresses; neither CUDA nor what lies there. It writes no byte, for others may own them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from services.contract.errors import Unavailable

THREADS = 16
_PIECE_BYTES = 128 * 2**20  # what a thread takes at a time, and is not interrupted in: some 0.1 s
_MADV_HUGEPAGE = 14  # <linux/mman.h>
_MADV_POPULATE_WRITE = 23  # since Linux 5.14


def fault_in(address: int, length: int, called_off: threading.Event, threads: int = THREADS) -> None:
    """Return once every page of `length` bytes at `address` is in memory, huge where the mount allows it.

    Args:
        address: of a shared mapping in this process, a multiple of the page size.
        length: bytes.
        called_off: once set, what is left is not done.
        threads: at most; never more than this process may use cores.

    Raises:
        OSError: EFAULT: the file system has no room for a page; ENOMEM: memory is short.
        Unavailable: called off.
    """
    _madvise(address, length, _MADV_HUGEPAGE)  # a kernel built without them says EINVAL, and all is as before

    def piece(offset: int) -> None:
        if called_off.is_set():
            raise Unavailable("the start was called off")
        size = min(_PIECE_BYTES, length - offset)
        error = _madvise(address + offset, size, _MADV_POPULATE_WRITE)
        if error == errno.EINVAL:
            _read_a_byte_of_each_page(address + offset, size)
        elif error:
            raise OSError(error, os.strerror(error))

    workers = min(threads, len(os.sched_getaffinity(0)))
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fault-in")
    try:
        for _ in pool.map(piece, range(0, length, _PIECE_BYTES)):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def fault_in_file(path: Path, called_off: threading.Event) -> None:
    """The same for a whole file, by a mapping of its own; whoever maps it later finds its pages there.

    Raises:
        OSError: it cannot be mapped; else as `fault_in`.
        Unavailable: called off.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(descriptor, 0) as memory:
            length = len(memory)
            view = ctypes.c_char.from_buffer(memory)
            try:
                fault_in(ctypes.addressof(view), length, called_off)
            finally:
                del view  # or the mapping could not be closed
    finally:
        os.close(descriptor)


def _madvise(address: int, length: int, advice: int) -> int:
    """The error number, 0 if there was none. Unlike mmap.madvise it lets other threads of Python run."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice))
    return ctypes.get_errno() if libc.madvise(*arguments) else 0


def _read_a_byte_of_each_page(address: int, length: int) -> None:
    """For older kernels: reading a hole of a tmpfs through a mapping allocates the page."""
    memory = memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()
