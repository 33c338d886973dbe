"""Time on a GPU, and host memory to read from: what the GPU benchmarks share.

Knows nothing of what is timed.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
from collections.abc import Callable

import torch

from services.decoder.kernels.gpu.host_memory import RegisteredMemory

GIB = 2**30


class Arena:
    """A registered file on a tmpfs, filled with numbers that tell blocks apart."""

    def __init__(self, length: int) -> None:
        descriptor, path = tempfile.mkstemp(dir="/dev/shm")
        os.unlink(path)  # noqa: PTH108  # the mapping keeps the bytes
        os.ftruncate(descriptor, length)
        self.memory = mmap.mmap(descriptor, length)
        os.close(descriptor)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.words = torch.frombuffer(self.memory, dtype=torch.int32)
        step = 2**26  # divides 2^31, so that no stretch wraps inside itself
        numbers = torch.arange(step, dtype=torch.int32)
        for at in range(0, self.words.shape[0], step):
            end = min(at + step, self.words.shape[0])
            wrapped = (at + 2**31) % 2**32 - 2**31  # as int32 does; a block's words still tell it apart
            torch.add(numbers[: end - at], wrapped, out=self.words[at:end])
        self.registered = RegisteredMemory(self.words.data_ptr(), length)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def seconds_of(work: Callable[[], object], prepare: Callable[[], None], replays: int) -> float:
    """Median seconds between two events around `work`; `prepare` runs before each, untimed."""
    taken = []
    for _ in range(replays + 1):
        prepare()
        begin, end = _event(), _event()
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(taken[1:])


def copy_engine_gb_s(arena: Arena) -> float:
    """What cudaMemcpyAsync reaches from the arena."""
    words = arena.words[: GIB // 4]
    target = torch.empty_like(words, device="cuda")
    return GIB / seconds_of(lambda: target.copy_(words, non_blocking=True), lambda: None, 5) / 1e9
