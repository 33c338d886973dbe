"""Rotary positions on the GPU: shapes checked, a variant of rope.cu chosen, one launch.

The twin in kernels/rope.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.gpu.norm import ELEMENTS

_THREADS = 128


class RopeParams(ctypes.Structure):
    """As rope.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "qkv", "cos", "sin", "position", "q_norm", "k_norm", "query", "key",
        )),
        *((name, ctypes.c_int32) for name in ("rows", "heads", "kv_heads", "row_stride", "wide_position")),
        ("eps", ctypes.c_float),
    ]  # fmt: skip


@dataclass(frozen=True)
class RopeShape:
    """What a variant is compiled for."""

    head_dim: int  # a multiple of 16, at most 512
    dtype: torch.dtype

    @staticmethod
    def takes(head_dim: int) -> bool:
        """Whether there is a variant for heads of `head_dim`."""
        return head_dim % 16 == 0 and 0 < head_dim <= 512

    @property
    def lanes(self) -> int:
        """Threads a head: one for 8 numbers of each half, up to a power of two."""
        return int(1 << (self.head_dim // 16 - 1).bit_length())

    @property
    def defines(self) -> dict[str, int]:
        """The constants that rope.cu's head asks for."""
        return {"ELEMENT": ELEMENTS[self.dtype], "HEAD_DIM": self.head_dim, "THREADS": _THREADS}

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("rope", self.defines, threads=_THREADS, cluster=1, shared_bytes=0, overlaps=True)


@dataclass(frozen=True, slots=True)
class RopeCall:
    """One launch; of one dtype on the device, contiguous unless said."""

    qkv: Tensor  # [rows, (heads + 2 kv_heads) * head_dim], rows contiguous
    cos: Tensor  # [positions, head_dim]
    sin: Tensor  # [positions, head_dim]
    position: Tensor  # [rows] int32 or int64
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    query: Tensor  # out [rows, heads, head_dim]
    key: Tensor  # out [rows, kv_heads, head_dim]
    eps: float

    def launch(self, shape: RopeShape) -> None:
        """Launch on torch's current stream."""
        rows, heads, kv_heads = self.qkv.shape[0], self.query.shape[1], self.key.shape[1]
        parameters = RopeParams(
            qkv=self.qkv.data_ptr(),
            cos=self.cos.data_ptr(),
            sin=self.sin.data_ptr(),
            position=self.position.data_ptr(),
            q_norm=None if self.q_norm is None else self.q_norm.data_ptr(),
            k_norm=None if self.k_norm is None else self.k_norm.data_ptr(),
            query=self.query.data_ptr(),
            key=self.key.data_ptr(),
            rows=rows,
            heads=heads,
            kv_heads=kv_heads,
            row_stride=self.qkv.stride(0),
            wide_position=self.position.dtype == torch.int64,
            eps=self.eps,
        )
        threads = rows * (heads + kv_heads) * shape.lanes
        shape.kernel.launch(-(-threads // _THREADS), parameters)

    def check(self, shape: RopeShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        size, rows = shape.head_dim, self.qkv.shape[0]
        if not shape.takes(size):
            raise ValueError(f"head_dim must be a multiple of 16, at most 512, not {size}")
        if self.query.shape[::2] != (rows, size) or self.key.shape[::2] != (rows, size):
            raise ValueError(f"query and key must be [{rows}, heads, {size}]")
        width = (self.query.shape[1] + 2 * self.key.shape[1]) * size
        if self.qkv.shape[1] != width or self.qkv.stride(1) != 1 or self.qkv.stride(0) % 8:
            raise ValueError(f"qkv must be [{rows}, {width}] with contiguous rows, 16 bytes apart")
        if self.position.dtype not in (torch.int32, torch.int64) or self.position.shape != (rows,):
            raise ValueError(f"position must be [{rows}] int32 or int64")
        for name in ("qkv", "cos", "sin", "q_norm", "k_norm", "query", "key"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.dtype != shape.dtype or tensor.shape[-1] not in (size, width) or tensor.data_ptr() % 16:
                raise ValueError(f"{name} must be {shape.dtype} by {size}, beginning at 16 bytes")
            if name != "qkv" and not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous")
