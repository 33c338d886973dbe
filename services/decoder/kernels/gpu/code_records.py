"""Latent records in eight bits on the GPU: one launch for any number of them.

The twin in kernels/record_code.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.record_code import TILE, coded_bytes

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CodeRecordsParams(ctypes.Structure):
    """As code_records.cu's struct, field by field."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("record", "coded")]


@dataclass(frozen=True)
class CodeRecordsShape:
    """What a variant is compiled for."""

    latent: int  # a multiple of TILE
    roped: int
    dtype: torch.dtype

    @property
    def defines(self) -> dict[str, int]:
        """The constants that code_records.cu's head asks for."""
        return {"LATENT": self.latent, "ROPED": self.roped, "ELEMENT": _ELEMENTS[self.dtype]}

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        threads = 32 * (self.latent // TILE + 1)
        return Kernel("code_records", self.defines, threads=threads, cluster=1, shared_bytes=0, overlaps=True)


@dataclass(frozen=True, slots=True)
class CodeRecordsCall:
    """One launch; both lie on the device."""

    record: Tensor  # [n, latent + roped]
    coded: Tensor  # [n, coded bytes] uint8; written

    def launch(self, shape: CodeRecordsShape) -> None:
        """Launch on torch's current stream."""
        parameters = CodeRecordsParams(record=self.record.data_ptr(), coded=self.coded.data_ptr())
        shape.kernel.launch(self.record.shape[0], parameters)

    def check(self, shape: CodeRecordsShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        count = self.record.shape[0]
        if shape.latent % TILE or not shape.latent:
            raise ValueError(f"latent must be tiles of {TILE}, is {shape.latent}")
        wanted = {
            "record": ((count, shape.latent + shape.roped), shape.dtype),
            "coded": ((count, coded_bytes(shape.latent, shape.roped)), torch.uint8),
        }
        for name, (size, dtype) in wanted.items():
            tensor: Tensor = getattr(self, name)
            if tensor.shape != size or tensor.dtype != dtype or not tensor.is_contiguous() or not count:
                raise ValueError(f"{name} must be contiguous {dtype} {list(size)}, of one record at least")
        if self.coded.data_ptr() % 16:
            raise ValueError("coded must begin at a multiple of 16 bytes")
