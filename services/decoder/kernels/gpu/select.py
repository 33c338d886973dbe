"""select on the GPU: Quest's scores and their exact top-k; one launch.

The twin in kernels/select.py is the definition. The set of blocks is the twin's; the order, in which resolve
breaks ties of its LRU, is ascending here and so a function of the scores alone: the open block comes last,
and -1 pads where a row has fewer than `top_k` blocks.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_THREADS = 256


class SelectParams(ctypes.Structure):
    """As select.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "query", "bounds", "seats", "length", "real_rows", "device_pages", "selected", "keys", "arrived",
        )),
        ("query_stride", ctypes.c_int64),
        ("max_pages", ctypes.c_int32),
    ]  # fmt: skip


@dataclass(frozen=True)
class SelectShape:
    """What a variant is compiled for."""

    head_dim: int
    kv_heads: int
    groups: int  # divides kv_heads
    group_size: int  # query heads that share a KV head
    block_tokens: int
    blocks_per_page: int
    top_k: int
    dtype: torch.dtype

    @property
    def defines(self) -> dict[str, int]:
        """The constants that select.cu's head asks for."""
        return {
            "HEAD_DIM": self.head_dim,
            "KV_HEADS": self.kv_heads,
            "GROUPS": self.groups,
            "GROUP_SIZE": self.group_size,
            "BLOCK_TOKENS": self.block_tokens,
            "BLOCKS_PER_PAGE": self.blocks_per_page,
            "TOP_K": self.top_k,
            "ELEMENT": _ELEMENTS[self.dtype],
            "THREADS": _THREADS,
        }

    @property
    def shared_bytes(self) -> int:
        """One lane's query, folded, in float32."""
        return 4 * self.kv_heads // self.groups * 2 * self.head_dim

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "select",
            self.defines,
            threads=_THREADS,
            cluster=1,
            shared_bytes=self.shared_bytes,
            overlaps=True,
        )

    @cached_property
    def thread_blocks(self) -> int:
        """As many as run at once; blocks to score are dealt out to them evenly."""
        return self.kernel.most_clusters()


@dataclass(frozen=True, slots=True)
class SelectCall:
    """One layer's launch. Contiguous int32 tensors on the device unless said.

    `seats`, `length`, `real_rows`, `device_pages` and the bounds of full blocks are read before the kernel
    ahead has ended: within a step nothing may write them before this launch.
    """

    query: Tensor  # [rows, query heads, head_dim], after rope; rows may lie apart
    bounds: Tensor  # [device pages, blocks a page, kv_heads, 2 * head_dim]
    seats: Tensor  # [rows]
    length: Tensor  # [rows] tokens, the newest included
    real_rows: Tensor  # [1]
    device_pages: Tensor  # [table rows, max_pages]
    selected: Tensor  # out [rows * groups, top_k]; padding rows are left alone
    keys: Tensor  # workspace, at least `workspace` elements; launches of one stream may share it
    arrived: Tensor  # [at least rows * groups], zero between launches; likewise

    @staticmethod
    def workspace(shape: SelectShape, rows: int, max_pages: int) -> int:
        """Elements of `keys`: one a block of each lane."""
        return rows * shape.groups * (-(-max_pages * shape.blocks_per_page // 4) * 4)

    def launch(self, shape: SelectShape) -> None:
        """Launch on torch's current stream."""
        parameters = SelectParams(
            query=self.query.data_ptr(),
            bounds=self.bounds.data_ptr(),
            seats=self.seats.data_ptr(),
            length=self.length.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            device_pages=self.device_pages.data_ptr(),
            selected=self.selected.data_ptr(),
            keys=self.keys.data_ptr(),
            arrived=self.arrived.data_ptr(),
            query_stride=self.query.stride(0) * self.query.element_size(),
            max_pages=self.device_pages.shape[1],
        )
        shape.kernel.launch(shape.thread_blocks, parameters)

    def check(self, shape: SelectShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        rows = self.seats.shape[0]
        for name in ("seats", "length", "real_rows", "device_pages", "selected", "keys", "arrived"):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device.type != "cuda":
                raise ValueError(f"{name} must be a contiguous int32 tensor on the GPU, is {tensor.dtype}")
        for name, wanted in (
            ("length", (rows,)),
            ("real_rows", (1,)),
            ("selected", (rows * shape.groups, shape.top_k)),
        ):
            if getattr(self, name).shape != wanted:
                raise ValueError(f"{name} must be {list(wanted)}, is {list(getattr(self, name).shape)}")
        query_heads = shape.kv_heads * shape.group_size
        if self.query.shape != (rows, query_heads, shape.head_dim) or self.query.dtype != shape.dtype:
            raise ValueError(f"query must be {shape.dtype} [{rows}, {query_heads}, {shape.head_dim}]")
        if self.query.stride()[1:] != (shape.head_dim, 1):
            raise ValueError("query's rows must be contiguous")
        wanted_bounds = (shape.blocks_per_page, shape.kv_heads, 2 * shape.head_dim)
        if self.bounds.shape[1:] != wanted_bounds or self.bounds.dtype != shape.dtype:
            raise ValueError(f"bounds must be {shape.dtype} [pages, {', '.join(map(str, wanted_bounds))}]")
        if not self.bounds.is_contiguous():
            raise ValueError("bounds must be contiguous")
        needed = self.workspace(shape, rows, self.device_pages.shape[1])
        if needed >= 2**31:  # the kernel counts parts of lanes, at most one a block, in 32 bits
            raise ValueError(f"device_pages: {needed:,} blocks of {rows} rows are more than 2^31")
        if self.keys.numel() < needed or self.keys.data_ptr() % 16:
            raise ValueError(f"keys must be at least {needed:,} aligned elements, is {self.keys.numel():,}")
        if self.arrived.numel() < rows * shape.groups:
            raise ValueError(f"arrived must be at least {rows * shape.groups} elements")
