"""write_run on the GPU: one launch a layer and target.

The twin in kernels/write_run.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

_THREADS = 256


class WriteRunParams(ctypes.Structure):
    """As write_run.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("key", "value", "target", "pages")),
        *((name, ctypes.c_int64) for name in ("key_stride", "value_stride")),
        *((name, ctypes.c_int32) for name in ("first", "tokens")),
    ]


@dataclass(frozen=True)
class WriteRunShape:
    """What a variant is compiled for."""

    kv_heads: int
    groups: int  # divides kv_heads
    head_bytes: int  # of one head's key, a multiple of 16
    page_tokens: int
    sides: int = 2  # of a record: keys and values, or 1 where the key is all there is

    @property
    def defines(self) -> dict[str, int]:
        """The constants that write_run.cu's head asks for."""
        return {
            "KV_HEADS": self.kv_heads,
            "GROUPS": self.groups,
            "SIDES": self.sides,
            "HEAD_BYTES": self.head_bytes,
            "PAGE_TOKENS": self.page_tokens,
            "THREADS": _THREADS,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("write_run", self.defines, threads=_THREADS, cluster=1, shared_bytes=0)


@dataclass(frozen=True, slots=True)
class WriteRunCall:
    """One launch."""

    key: Tensor  # [tokens, kv_heads, head_dim], heads contiguous; tokens may lie apart
    value: Tensor  # likewise; of no numbers in a record of one side
    target: Tensor  # [all pages, groups, page_tokens, record elements] contiguous
    pages: Tensor  # [n] int32
    first: int

    def launch(self, shape: WriteRunShape) -> None:
        """Launch on torch's current stream."""
        parameters = WriteRunParams(
            key=self.key.data_ptr(),
            value=self.value.data_ptr(),
            target=self.target.data_ptr(),
            pages=self.pages.data_ptr(),
            key_stride=self.key.stride(0) * self.key.element_size(),
            value_stride=self.value.stride(0) * self.value.element_size(),
            first=self.first,
            tokens=self.key.shape[0],
        )
        pieces = self.key.shape[0] * shape.sides * shape.kv_heads * shape.head_bytes // 16
        shape.kernel.launch(-(-pieces // _THREADS), parameters)

    def check(self, shape: WriteRunShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        tokens, kv_heads, head_dim = self.key.shape
        if shape.sides == 1 and self.value.numel():
            raise ValueError("value must be empty where a record has one side")
        for name in ("key", "value")[: shape.sides]:
            tensor: Tensor = getattr(self, name)
            if tensor.shape != self.key.shape or tensor.dtype != self.target.dtype:
                raise ValueError(f"{name} must be {self.target.dtype} {list(self.key.shape)}")
            aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
            if tensor.stride()[1:] != (head_dim, 1) or not aligned:
                raise ValueError(f"{name}'s tokens must be contiguous and start at multiples of 16 bytes")
        if (kv_heads, head_dim * self.key.element_size()) != (shape.kv_heads, shape.head_bytes):
            raise ValueError(f"key must be of {shape.kv_heads} heads of {shape.head_bytes} bytes")
        wanted = (shape.groups, shape.page_tokens, shape.sides * kv_heads // shape.groups * head_dim)
        if self.target.shape[1:] != wanted or not self.target.is_contiguous():
            raise ValueError(f"target must be contiguous [pages, {', '.join(map(str, wanted))}]")
        if self.pages.dtype != torch.int32 or not self.pages.is_contiguous():
            raise ValueError("pages must be contiguous int32")
        if not 0 <= self.first < shape.page_tokens or tokens < 1:
            raise ValueError(f"a run must begin inside its first page, not at {self.first}")
        if self.first + tokens > self.pages.shape[0] * shape.page_tokens:
            raise ValueError(f"{self.pages.shape[0]} pages do not hold {tokens} tokens from {self.first} on")
