"""replay on the GPU: one copy-only launch for a layer that shares another layer's tables.

The twin in kernels/replay.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.step_kernels import MissPlan

BLOCKS = 64
"""Thread blocks of a launch, whatever the batch: half of an H200, and enough to fill the link."""
AHEAD_BLOCKS = 16
"""Of a launch beside other work: 256 KiB in flight, an eighth of an H200's multiprocessors. Not tuned yet."""
_THREADS = 512
_DEPTH = 2


class ReplayParams(ctypes.Structure):
    """As replay.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "source", "target", "count", "arena", "pool", "counters", "waited_until",
        )),
        ("lanes", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
    ]  # fmt: skip


@dataclass(frozen=True)
class ReplayShape:
    """What a variant is compiled for."""

    block_bytes: int
    skip_io: bool = False
    ahead: bool = False  # on a stream of its own, beside other work

    @property
    def thread_blocks(self) -> int:
        """Of a launch."""
        return AHEAD_BLOCKS if self.ahead else BLOCKS

    @property
    def defines(self) -> dict[str, int]:
        """The constants that replay.cu's head asks for."""
        return {
            "BLOCK_BYTES": self.block_bytes,
            "THREADS": _THREADS,
            "DEPTH": _DEPTH,
            "SKIP_IO": int(self.skip_io),
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        # Ahead, what it waits for is another stream's, so there is no launch of its own to overlap with.
        overlaps = not self.ahead
        return Kernel("replay", self.defines, threads=_THREADS, cluster=1, shared_bytes=0, overlaps=overlaps)


@dataclass(frozen=True, slots=True)
class ReplayCall:
    """One layer's launch: everything but the variant."""

    plan: MissPlan  # of the resolve that this layer follows
    arena_pointer: int  # of the layer's first block, as the device addresses it
    pool: Tensor  # [pool slots, block elements], any dtype
    counters: Tensor  # [6] int64
    waited_until: Tensor | None = None  # [1] int64, as resolve's

    def launch(self, shape: ReplayShape) -> None:
        """Launch on torch's current stream."""
        lanes, top_k = self.plan.source.shape
        parameters = ReplayParams(
            source=self.plan.source.data_ptr(),
            target=self.plan.target.data_ptr(),
            count=self.plan.count.data_ptr(),
            arena=self.arena_pointer,
            pool=self.pool.data_ptr(),
            counters=self.counters.data_ptr(),
            waited_until=None if self.waited_until is None else self.waited_until.data_ptr(),
            lanes=lanes,
            top_k=top_k,
        )
        shape.kernel.launch(shape.thread_blocks, parameters)

    def check(self, shape: ReplayShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or device that is off, by name.
        """
        plan = self.plan
        for name in ("source", "target", "count"):
            tensor = getattr(plan, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device.type != "cuda":
                raise ValueError(f"plan.{name} must be a contiguous int32 tensor on the GPU")
        if plan.target.shape != plan.source.shape or plan.count.shape != plan.source.shape[:1]:
            raise ValueError("plan.source and plan.target must be [lanes, top_k], plan.count [lanes]")
        row_bytes = self.pool.shape[1] * self.pool.element_size()
        if row_bytes != shape.block_bytes or not self.pool.is_contiguous():
            raise ValueError(f"pool rows must be {shape.block_bytes} contiguous bytes")
        if self.counters.dtype != torch.int64 or self.counters.shape != (6,):
            raise ValueError("counters must be [6] int64")
