"""Decode attention on the GPU: shapes checked, a variant of attend.cu chosen, one launch.

The twin in kernels/attend.py (attend_slots) is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WARPS = 4
_WAVES = 2  # thread blocks a multiprocessor; measured best at 2 to 32 rows (docs/log.md)


class AttendParams(ctypes.Structure):
    """As attend.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "query", "pool", "slots", "selected", "length", "real_rows", "out", "partial", "arrived",
        )),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("top_k", "groups", "heads", "splits")),
    ]  # fmt: skip


@dataclass(frozen=True)
class AttendShape:
    """What a variant is compiled for."""

    head_dim: int
    group_size: int  # query heads that share a KV head
    block_tokens: int
    dtype: torch.dtype

    @property
    def defines(self) -> dict[str, int]:
        """The constants that attend.cu's head asks for."""
        return {
            "HEAD_DIM": self.head_dim,
            "GROUP_SIZE": self.group_size,
            "BLOCK_TOKENS": self.block_tokens,
            "ELEMENT": _ELEMENTS[self.dtype],
            "WARPS": _WARPS,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("attend", self.defines, threads=32 * _WARPS, cluster=1, shared_bytes=0)

    def splits(self, units: int, top_k: int) -> int:
        """Into how many parts each KV head's blocks are cut, so that few rows still fill the device."""
        wanted = -(-_WAVES * torch.cuda.get_device_properties().multi_processor_count // units)
        return max(1, min(wanted, top_k))


@dataclass(frozen=True, slots=True)
class AttendCall:
    """One layer's launch. Index tensors are int32; everything lies on the device."""

    query: Tensor  # [rows, query heads, head_dim]
    pool: Tensor  # [pool slots, block_tokens, 2, heads of a group, head_dim]
    slots: Tensor  # [rows * groups, top_k], -1 = none
    selected: Tensor  # [rows * groups, top_k], -1 = none
    length: Tensor  # [rows]
    real_rows: Tensor  # [1]
    out: Tensor  # [rows, query heads, head_dim]
    partial: Tensor  # float32 workspace, at least `workspace` elements
    arrived: Tensor  # [rows * KV heads], zero
    groups: int
    scaling: float
    splits: int

    @staticmethod
    def workspace(shape: AttendShape, units: int, splits: int) -> int:
        """Elements of `partial`."""
        return units * splits * shape.group_size * (shape.head_dim + 2)

    def launch(self, shape: AttendShape) -> None:
        """Launch on torch's current stream."""
        heads = self.pool.shape[3]
        parameters = AttendParams(
            query=self.query.data_ptr(),
            pool=self.pool.data_ptr(),
            slots=self.slots.data_ptr(),
            selected=self.selected.data_ptr(),
            length=self.length.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            out=self.out.data_ptr(),
            partial=self.partial.data_ptr(),
            arrived=self.arrived.data_ptr(),
            scaling=self.scaling,
            top_k=self.slots.shape[1],
            groups=self.groups,
            heads=heads,
            splits=self.splits,
        )
        shape.kernel.launch(self.slots.shape[0] * heads * self.splits, parameters)

    def check(self, shape: AttendShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        heads = self.pool.shape[3]
        if self.pool.shape[1:] != (shape.block_tokens, 2, heads, shape.head_dim):
            raise ValueError(f"pool must be [slots, {shape.block_tokens}, 2, heads, {shape.head_dim}]")
        if self.query.shape[1] != self.groups * heads * shape.group_size:
            raise ValueError(
                f"query has {self.query.shape[1]} heads, not {self.groups * heads * shape.group_size}"
            )
        for name in ("query", "pool", "out"):
            if getattr(self, name).dtype != shape.dtype or not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} must be contiguous {shape.dtype}")
        for name in ("slots", "selected", "length", "real_rows", "arrived"):
            if getattr(self, name).dtype != torch.int32 or not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} must be contiguous int32")
        units = self.slots.shape[0] * heads
        if self.partial.numel() < self.workspace(shape, units, self.splits) or self.arrived.numel() < units:
            raise ValueError("the workspace is too small for this many rows and splits")
