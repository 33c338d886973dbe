"""swiglu on the GPU, behind a product of many rows: one launch.

The twin in kernels/linear.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.gpu.norm import ELEMENTS

_THREADS = 256


class SwigluParams(ctypes.Structure):
    """As swiglu.cu's struct, field by field."""

    _fields_ = [
        ("both", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("pieces", ctypes.c_uint32),
        ("row", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class SwigluShape:
    """What a variant is compiled for."""

    dtype: torch.dtype

    @property
    def defines(self) -> dict[str, int]:
        """The constants that swiglu.cu's head asks for."""
        return {"ELEMENT": ELEMENTS[self.dtype], "THREADS": _THREADS}

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("swiglu", self.defines, threads=_THREADS, cluster=1, shared_bytes=0)


@dataclass(frozen=True, slots=True)
class SwigluCall:
    """One launch; contiguous on the device, of one dtype, beginning at 16 bytes; `size` a multiple of 8."""

    both: Tensor  # [rows, 2 * size]
    out: Tensor  # [rows, size]

    def launch(self, shape: SwigluShape) -> None:
        """Launch on torch's current stream."""
        parameters = SwigluParams(
            both=self.both.data_ptr(),
            out=self.out.data_ptr(),
            pieces=self.out.numel() // 8,
            row=self.out.shape[1] // 8,
        )
        shape.kernel.launch(-(-self.out.numel() // 8 // _THREADS), parameters)
