"""locate on the GPU: where device-resident blocks lie, by page table; one launch.

The twin in kernels/twins.py (locate) is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

_THREADS = 128


class LocateParams(ctypes.Structure):
    """As locate.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "selected", "seats", "length", "real_rows", "device_pages", "slots", "open_slot", "counters",
        )),
        *((name, ctypes.c_int32) for name in ("lanes", "max_pages")),
    ]  # fmt: skip


@dataclass(frozen=True)
class LocateShape:
    """What a variant is compiled for."""

    top_k: int
    groups: int
    block_tokens: int
    blocks_per_page: int

    @property
    def defines(self) -> dict[str, int]:
        """The constants that locate.cu's head asks for."""
        return {
            "TOP_K": self.top_k,
            "GROUPS": self.groups,
            "BLOCK_TOKENS": self.block_tokens,
            "BLOCKS_PER_PAGE": self.blocks_per_page,
            "THREADS": _THREADS,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("locate", self.defines, threads=_THREADS, cluster=1, shared_bytes=0, overlaps=True)


@dataclass(frozen=True, slots=True)
class LocateCall:
    """One layer's launch. Contiguous int32 tensors on the device unless said.

    `seats`, `length`, `real_rows` and `device_pages` are read before the kernel ahead has ended: within a
    step nothing may write them.
    """

    selected: Tensor  # [rows * groups, top_k] blocks, -1 = none
    seats: Tensor  # [rows]
    length: Tensor  # [rows] tokens, the newest included
    real_rows: Tensor  # [1]
    device_pages: Tensor  # [table rows, max_pages]
    slots: Tensor  # out [rows * groups, top_k] blocks of the pool, -1 = none
    open_slot: Tensor  # out [rows * groups]
    counters: Tensor  # [6] int64, added to

    def launch(self, shape: LocateShape) -> None:
        """Launch on torch's current stream."""
        parameters = LocateParams(
            selected=self.selected.data_ptr(),
            seats=self.seats.data_ptr(),
            length=self.length.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            device_pages=self.device_pages.data_ptr(),
            slots=self.slots.data_ptr(),
            open_slot=self.open_slot.data_ptr(),
            counters=self.counters.data_ptr(),
            lanes=self.selected.shape[0],
            max_pages=self.device_pages.shape[1],
        )
        shape.kernel.launch(-(-self.selected.numel() // _THREADS), parameters)

    def check(self, shape: LocateShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or device that is off, by name.
        """
        rows = self.seats.shape[0]
        for name in ("selected", "seats", "length", "real_rows", "device_pages", "slots", "open_slot"):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device.type != "cuda":
                raise ValueError(f"{name} must be a contiguous int32 tensor on the GPU, is {tensor.dtype}")
        lanes = rows * shape.groups
        for name, wanted in (
            ("selected", (lanes, shape.top_k)),
            ("slots", (lanes, shape.top_k)),
            ("open_slot", (lanes,)),
            ("length", (rows,)),
            ("real_rows", (1,)),
        ):
            if getattr(self, name).shape != wanted:
                raise ValueError(f"{name} must be {list(wanted)}, is {list(getattr(self, name).shape)}")
        if self.counters.dtype != torch.int64 or self.counters.shape != (6,):
            raise ValueError("counters must be [6] int64")
