"""add_entry on the GPU: the new tokens into NSA's entries, on the device and in the arena; one launch.

The twin in kernels/block_twins.py (add) is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.gpu.new_tokens import check_new_tokens

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_THREADS = 128


class AddEntryParams(ctypes.Structure):
    """As add_entry.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "added", "seats", "length", "real_rows", "host_pages", "device_pages", "device", "arena",
        )),
        ("max_pages", ctypes.c_int32),
    ]  # fmt: skip


@dataclass(frozen=True)
class AddEntryShape:
    """What a variant is compiled for."""

    entry: int  # numbers, a multiple of 4
    entry_tokens: int
    page_tokens: int  # a multiple of entry_tokens
    dtype: torch.dtype

    @property
    def defines(self) -> dict[str, int]:
        """The constants that add_entry.cu's head asks for."""
        return {
            "ENTRY": self.entry,
            "ENTRY_TOKENS": self.entry_tokens,
            "PAGE_TOKENS": self.page_tokens,
            "ELEMENT": _ELEMENTS[self.dtype],
            "THREADS": _THREADS,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("add_entry", self.defines, threads=_THREADS, cluster=1, shared_bytes=0, overlaps=True)


@dataclass(frozen=True, slots=True)
class AddEntryCall:
    """One layer's launch. Index tensors are contiguous int32; everything but the arena lies on the device."""

    added: Tensor  # [rows, entry]
    seats: Tensor  # [rows]
    length: Tensor  # [rows] tokens, the new one included
    real_rows: Tensor  # [1]
    host_pages: Tensor  # [table rows, max_pages]
    device_pages: Tensor  # [table rows, max_pages]
    device: Tensor  # [device pages * entries of a page, entry]
    arena_pointer: int  # of the layer's first page, as the device addresses it

    def launch(self, shape: AddEntryShape) -> None:
        """Launch on torch's current stream."""
        parameters = AddEntryParams(
            added=self.added.data_ptr(),
            seats=self.seats.data_ptr(),
            length=self.length.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            host_pages=self.host_pages.data_ptr(),
            device_pages=self.device_pages.data_ptr(),
            device=self.device.data_ptr(),
            arena=self.arena_pointer,
            max_pages=self.host_pages.shape[1],
        )
        shape.kernel.launch(-(-self.added.shape[0] * shape.entry // 4 // _THREADS), parameters)

    def check(self, shape: AddEntryShape) -> None:
        """Refuse what the kernel would read or write wrongly.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        check_new_tokens(self)
        rows = self.seats.shape[0]
        for name, count in (("added", rows), ("device", self.device.shape[0])):
            tensor: Tensor = getattr(self, name)
            if tensor.shape != (count, shape.entry) or tensor.dtype != shape.dtype:
                raise ValueError(f"{name} must be {shape.dtype} [{count}, {shape.entry}]")
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(f"{name} must be contiguous and begin at a multiple of 16 bytes")
        if self.arena_pointer % 16 or shape.entry % 4:
            raise ValueError("entries must begin at multiples of 16 bytes and be of whole groups of four")
