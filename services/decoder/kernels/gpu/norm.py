"""RMSNorm on the GPU: shapes checked, a variant of rms_norm.cu chosen, one launch.

The twin in kernels/norm.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

ELEMENTS = {torch.bfloat16: 1, torch.float16: 2}
_MOST_THREADS = 1024


class NormParams(ctypes.Structure):
    """As rms_norm.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "delta", "weight", "total", "out")),
        ("size", ctypes.c_int32),
        ("eps", ctypes.c_float),
    ]


@dataclass(frozen=True)
class NormShape:
    """What a variant is compiled for."""

    size: int  # of a row, a multiple of 8, at most 16,384
    dtype: torch.dtype

    @staticmethod
    def takes(size: int) -> bool:
        """Whether there is a variant for rows of `size`."""
        return size % 8 == 0 and 0 < size <= 2 * 8 * _MOST_THREADS

    @property
    def vectors(self) -> int:
        """16-byte loads a thread."""
        return -(-self.size // (8 * _MOST_THREADS))

    @property
    def threads(self) -> int:
        """Whole warps, as few as hold a row."""
        return 32 * -(-self.size // (8 * 32 * self.vectors))

    @property
    def defines(self) -> dict[str, int]:
        """The constants that rms_norm.cu's head asks for."""
        return {"ELEMENT": ELEMENTS[self.dtype], "THREADS": self.threads, "VECTORS": self.vectors}

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "rms_norm", self.defines, threads=self.threads, cluster=1, shared_bytes=0, overlaps=True
        )


@dataclass(frozen=True, slots=True)
class NormCall:
    """One launch; everything contiguous on the device, of one dtype."""

    x: Tensor  # [rows, size]
    delta: Tensor | None  # [rows, size]
    weight: Tensor  # [size]
    total: Tensor | None  # out [rows, size]: x + delta, where there is a delta
    out: Tensor  # [rows, size]
    eps: float

    def launch(self, shape: NormShape) -> None:
        """Launch on torch's current stream."""
        parameters = NormParams(
            x=self.x.data_ptr(),
            delta=None if self.delta is None else self.delta.data_ptr(),
            weight=self.weight.data_ptr(),
            total=None if self.total is None else self.total.data_ptr(),
            out=self.out.data_ptr(),
            size=shape.size,
            eps=self.eps,
        )
        shape.kernel.launch(self.x.shape[0], parameters)

    def check(self, shape: NormShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        if not shape.takes(shape.size):
            raise ValueError(f"a row must hold a multiple of 8, at most 16,384 numbers, not {shape.size}")
        if (self.delta is None) != (self.total is None):
            raise ValueError("delta and total come together")
        for name in ("x", "delta", "weight", "total", "out"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            wanted = (shape.size,) if name == "weight" else (self.x.shape[0], shape.size)
            if tensor.shape != wanted or tensor.dtype != shape.dtype or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous {shape.dtype} {list(wanted)}")
            if tensor.data_ptr() % 16:
                raise ValueError(f"{name} must begin at a multiple of 16 bytes")
