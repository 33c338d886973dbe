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

    warps: int = 4
    depth: int = 2  # tiles of 16 tokens that each warp has under way
    cluster: int = 1

    @property
    def source(self) -> str:
        """Tensor cores for 16-bit types."""
        return "attend_plain" if self.dtype == torch.float32 else "attend"

    @property
    def defines(self) -> dict[str, int]:
        """The constants that the sources' heads ask for."""
        return {
            "HEAD_DIM": self.head_dim,
            "GROUP_SIZE": self.group_size,
            "BLOCK_TOKENS": self.block_tokens,
            "ELEMENT": _ELEMENTS[self.dtype],
            "WARPS": self.warps,
            "DEPTH": self.depth,
            "CLUSTER": self.cluster,
        }

    @property
    def shared_bytes(self) -> int:
        """What the sources lay out in shared memory."""
        part = -(-self.group_size * (self.head_dim + 6) * 4 // 16) * 16
        if self.dtype == torch.float32:
            lanes = min(32, 1 << (self.head_dim // 4 - 1).bit_length())
            return part * (self.warps * (32 // lanes) + 1)
        return self.warps * max(self.depth * 16 * (4 * self.head_dim + 16), part) + part

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            self.source,
            self.defines,
            threads=32 * self.warps,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
            overlaps=True,
        )

    def splits(self, top_k: int) -> int:
        """Into how many parts each KV head's blocks are cut."""
        return max(1, min(16, top_k))


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
    arrived: Tensor  # [rows * KV heads * cluster], zero
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
        if self.splits % shape.cluster:
            raise ValueError(f"splits must be a multiple of the cluster's {shape.cluster} thread blocks")
        units = self.slots.shape[0] * heads
        if self.partial.numel() < self.workspace(shape, units, self.splits):
            raise ValueError("partial is too small for this many rows and splits")
        if self.arrived.numel() < units * shape.cluster:
            raise ValueError("arrived is too small for this many rows")
