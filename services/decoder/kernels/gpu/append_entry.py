"""append_entry on the GPU: the new tokens' index keys, to the device and the arena; one launch.

The twin in kernels/latent_twins.py (observe) is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.gpu.new_tokens import check_new_tokens

_THREADS = 128


class AppendEntryParams(ctypes.Structure):
    """As append_entry.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "key", "seats", "length", "real_rows", "host_pages", "device_pages", "device", "arena",
        )),
        ("max_pages", ctypes.c_int32),
    ]  # fmt: skip


@dataclass(frozen=True)
class AppendEntryShape:
    """What a variant is compiled for."""

    entry_bytes: int  # a multiple of 16
    page_tokens: int

    @property
    def defines(self) -> dict[str, int]:
        """The constants that append_entry.cu's head asks for."""
        return {"ENTRY_BYTES": self.entry_bytes, "PAGE_TOKENS": self.page_tokens, "THREADS": _THREADS}

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "append_entry", self.defines, threads=_THREADS, cluster=1, shared_bytes=0, overlaps=True
        )


@dataclass(frozen=True, slots=True)
class AppendEntryCall:
    """One layer's launch. Index tensors are contiguous int32; everything but the arena lies on the device.

    `seats`, `length`, `real_rows` and the page tables are read before the kernel ahead has ended: within a
    step nothing may write them.
    """

    key: Tensor  # [rows, elements]
    seats: Tensor  # [rows]
    length: Tensor  # [rows] tokens, the new one included
    real_rows: Tensor  # [1]
    host_pages: Tensor  # [table rows, max_pages]
    device_pages: Tensor  # [table rows, max_pages]
    device: Tensor  # [device pages * page_tokens, elements]
    arena_pointer: int  # of the layer's first page, as the device addresses it

    def launch(self, shape: AppendEntryShape) -> None:
        """Launch on torch's current stream."""
        parameters = AppendEntryParams(
            key=self.key.data_ptr(),
            seats=self.seats.data_ptr(),
            length=self.length.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            host_pages=self.host_pages.data_ptr(),
            device_pages=self.device_pages.data_ptr(),
            device=self.device.data_ptr(),
            arena=self.arena_pointer,
            max_pages=self.host_pages.shape[1],
        )
        shape.kernel.launch(-(-self.key.shape[0] * shape.entry_bytes // 16 // _THREADS), parameters)

    def check(self, shape: AppendEntryShape) -> None:
        """Refuse what the kernel would read or write wrongly.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        check_new_tokens(self)
        rows = self.seats.shape[0]
        for name in ("key", "device"):
            tensor: Tensor = getattr(self, name)
            if tensor.shape[1] * tensor.element_size() != shape.entry_bytes or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous entries of {shape.entry_bytes} bytes")
            if tensor.data_ptr() % 16:
                raise ValueError(f"{name} must begin at a multiple of 16 bytes")
        if self.key.shape[0] != rows or self.key.dtype != self.device.dtype:
            raise ValueError(f"key must be [{rows}, elements] of {self.device.dtype}")
        if self.arena_pointer % 16 or shape.entry_bytes % 16:
            raise ValueError("entries must be of, and begin at, multiples of 16 bytes")
