"""fill_bounds on the GPU: one launch a chunk and layer.

The twin in kernels/bounds.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_THREADS = 128


class FillBoundsParams(ctypes.Structure):
    """As fill_bounds.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("key", "block", "bounds")),
        ("key_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("tokens", "blocks")),
    ]


@dataclass(frozen=True)
class FillBoundsShape:
    """What a variant is compiled for."""

    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def defines(self) -> dict[str, int]:
        """The constants that fill_bounds.cu's head asks for."""
        return {
            "KV_HEADS": self.kv_heads,
            "HEAD_BYTES": self.head_dim * self.dtype.itemsize,
            "BLOCK_TOKENS": self.block_tokens,
            "ELEMENT": _ELEMENTS[self.dtype],
            "THREADS": _THREADS,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("fill_bounds", self.defines, threads=_THREADS, cluster=1, shared_bytes=0)


@dataclass(frozen=True, slots=True)
class FillBoundsCall:
    """One launch."""

    bounds: Tensor  # [all blocks, kv_heads, 2 * head_dim] contiguous
    key: Tensor  # [tokens, kv_heads, head_dim], heads contiguous; tokens may lie apart
    block: Tensor  # [ceil(tokens / block_tokens)] int64

    def launch(self, shape: FillBoundsShape) -> None:
        """Launch on torch's current stream."""
        parameters = FillBoundsParams(
            key=self.key.data_ptr(),
            block=self.block.data_ptr(),
            bounds=self.bounds.data_ptr(),
            key_stride=self.key.stride(0) * self.key.element_size(),
            tokens=self.key.shape[0],
            blocks=self.block.shape[0],
        )
        threads = self.block.shape[0] * self.bounds[0].numel() // 2 * self.bounds.element_size() // 16
        shape.kernel.launch(-(-threads // _THREADS), parameters)

    def check(self, shape: FillBoundsShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        tokens = self.key.shape[0]
        if self.key.shape[1:] != (shape.kv_heads, shape.head_dim) or self.key.dtype != shape.dtype:
            raise ValueError(f"key must be {shape.dtype} [tokens, {shape.kv_heads}, {shape.head_dim}]")
        aligned = self.key.data_ptr() % 16 == 0 and self.key.stride(0) * self.key.element_size() % 16 == 0
        if self.key.stride()[1:] != (shape.head_dim, 1) or not aligned:
            raise ValueError("key's tokens must be contiguous and start at multiples of 16 bytes")
        wanted = (shape.kv_heads, 2 * shape.head_dim)
        if self.bounds.shape[1:] != wanted or self.bounds.dtype != shape.dtype:
            raise ValueError(f"bounds must be {shape.dtype} [blocks, {wanted[0]}, {wanted[1]}]")
        if not self.bounds.is_contiguous() or self.bounds.data_ptr() % 16:
            raise ValueError("bounds must be contiguous and begin at a multiple of 16 bytes")
        blocks = -(-tokens // shape.block_tokens)
        if self.block.shape != (blocks,) or self.block.dtype != torch.int64 or tokens < 1:
            raise ValueError(f"block must be [{blocks}] int64")
