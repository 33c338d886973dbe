"""append on the GPU: new records to hot slots and the host arena, and the block bounds; one launch.

The twin in kernels/twins.py (append) is the definition; a slot that opens is zeroed here as there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}
_THREADS = 128


class AppendParams(ctypes.Structure):
    """As append.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "key", "value", "open_slot", "seats", "length", "real_rows", "host_pages", "device_pages",
            "pool", "arena", "bounds", "arena_bounds",
        )),
        *((name, ctypes.c_int64) for name in ("key_stride", "value_stride")),
        ("max_pages", ctypes.c_int32),
    ]  # fmt: skip


@dataclass(frozen=True)
class AppendShape:
    """What a variant is compiled for."""

    head_dim: int
    kv_heads: int
    groups: int  # divides kv_heads
    block_tokens: int
    blocks_per_page: int
    dtype: torch.dtype
    sides: int = 2  # of a record: keys and values, or 1 where the key is all there is

    @property
    def record_bytes(self) -> int:
        """Of one token in one group."""
        return self.sides * self.kv_heads // self.groups * self.head_dim * self.dtype.itemsize

    @property
    def parts(self) -> int:
        """Thread blocks of one row."""
        return -(-self.groups * self.record_bytes // 16 // _THREADS)

    @property
    def defines(self) -> dict[str, int]:
        """The constants that append.cu's head asks for."""
        return {
            "HEAD_DIM": self.head_dim,
            "KV_HEADS": self.kv_heads,
            "GROUPS": self.groups,
            "SIDES": self.sides,
            "BLOCK_TOKENS": self.block_tokens,
            "BLOCKS_PER_PAGE": self.blocks_per_page,
            "ELEMENT": _ELEMENTS[self.dtype],
            "THREADS": _THREADS,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("append", self.defines, threads=_THREADS, cluster=1, shared_bytes=0, overlaps=True)


@dataclass(frozen=True, slots=True)
class AppendCall:
    """One layer's launch. Index tensors are contiguous int32; everything but the arena lies on the device.

    `seats`, `length`, `real_rows` and the page tables are read before the kernel ahead has ended: within a
    step nothing may write them.
    """

    key: Tensor  # [rows, kv_heads, head_dim], heads contiguous; rows may lie apart
    value: Tensor  # likewise; of no numbers in a record of one side
    open_slot: Tensor  # [rows * groups] pool slots
    seats: Tensor  # [rows]
    length: Tensor  # [rows] tokens, the new one included
    real_rows: Tensor  # [1]
    host_pages: Tensor  # [table rows, max_pages]
    device_pages: Tensor  # [table rows, max_pages]
    pool: Tensor  # [pool slots, ...], a block's bytes a slot
    arena_pointer: int  # of the layer's first block, as the device addresses it
    bounds: Tensor | None  # [device pages, blocks a page, kv_heads, 2 * head_dim]; None = none are kept
    arena_bounds_pointer: int  # of the layer's first page of bounds, likewise; 0 without bounds

    def launch(self, shape: AppendShape) -> None:
        """Launch on torch's current stream."""
        parameters = AppendParams(
            key=self.key.data_ptr(),
            value=self.value.data_ptr(),
            open_slot=self.open_slot.data_ptr(),
            seats=self.seats.data_ptr(),
            length=self.length.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            host_pages=self.host_pages.data_ptr(),
            device_pages=self.device_pages.data_ptr(),
            pool=self.pool.data_ptr(),
            arena=self.arena_pointer,
            bounds=None if self.bounds is None else self.bounds.data_ptr(),
            arena_bounds=self.arena_bounds_pointer,
            key_stride=self.key.stride(0) * self.key.element_size(),
            value_stride=self.value.stride(0) * self.value.element_size(),
            max_pages=self.host_pages.shape[1],
        )
        shape.kernel.launch(self.key.shape[0] * shape.parts, parameters)

    def check(self, shape: AppendShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        rows = self.seats.shape[0]
        for name in ("open_slot", "seats", "length", "real_rows", "host_pages", "device_pages"):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device.type != "cuda":
                raise ValueError(f"{name} must be a contiguous int32 tensor on the GPU, is {tensor.dtype}")
        for name, size in (("open_slot", rows * shape.groups), ("length", rows), ("real_rows", 1)):
            if getattr(self, name).shape != (size,):
                raise ValueError(f"{name} must be [{size}], is {list(getattr(self, name).shape)}")
        if self.host_pages.shape != self.device_pages.shape:
            raise ValueError("host_pages and device_pages must have one shape")
        for name in ("key", "value")[: shape.sides]:
            tensor = getattr(self, name)
            if tensor.shape != (rows, shape.kv_heads, shape.head_dim) or tensor.dtype != shape.dtype:
                raise ValueError(f"{name} must be {shape.dtype} [{rows}, {shape.kv_heads}, {shape.head_dim}]")
            aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
            if tensor.stride()[1:] != (shape.head_dim, 1) or not aligned:
                raise ValueError(f"{name}'s rows must be contiguous and start at multiples of 16 bytes")
        if shape.sides == 1 and self.value.numel():
            raise ValueError("value must be empty where a record has one side")
        block_bytes = shape.block_tokens * shape.record_bytes
        if self.pool[0].numel() * self.pool.element_size() != block_bytes or not self.pool.is_contiguous():
            raise ValueError(f"pool must be contiguous slots of {block_bytes} bytes")
        if self.arena_pointer % 16:
            raise ValueError("arena_pointer must be a multiple of 16")
        if (self.bounds is None) != (self.arena_bounds_pointer == 0) or self.arena_bounds_pointer % 16:
            raise ValueError("arena_bounds_pointer must be a multiple of 16, and 0 only without bounds")
        if self.bounds is not None:
            if shape.dtype == torch.uint8:
                raise ValueError("bounds must be None of records that are bytes")
            wanted = (shape.blocks_per_page, shape.kv_heads, 2 * shape.head_dim)
            if self.bounds.shape[1:] != wanted or self.bounds.dtype != shape.dtype:
                raise ValueError(f"bounds must be {shape.dtype} [pages, {', '.join(map(str, wanted))}]")
            if not self.bounds.is_contiguous():
                raise ValueError("bounds must be contiguous")
