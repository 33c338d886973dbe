"""Decode attention on the GPU: shapes checked, a variant of attend.cu chosen, one launch.

The twin in kernels/attend.py (attend_slots) is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.gpu.kernel import Kernel

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WARPS = 4
_DIMS_UNDER_WAY = ((16, 256), (128, 384), (2**31, 128))
"""Up to so many rows x KV heads -> tiles of 16 tokens that a warp has under way, times head_dim: few rows
need long rings, many need many thread blocks (measured: docs/log.md). No result depends on it."""
_STATIC_BYTES = 1024
"""Of shared memory, that the kernel takes besides, and some to spare."""
_SPLIT_TOKENS = 256
_MOST_SPLITS = 64


class AttendParams(ctypes.Structure):
    """As attend.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "query", "pool", "slots", "selected", "length", "real_rows", "out", "lse", "sums", "stats",
            "arrived",
        )),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("top_k", "groups", "heads", "splits", "items")),
    ]  # fmt: skip


@dataclass(frozen=True)
class AttendShape:
    """What a variant is compiled for."""

    head_dim: int
    group_size: int  # query heads that share a KV head
    block_tokens: int
    dtype: torch.dtype
    depth: int = 2  # tiles of 16 tokens that a warp has under way
    window: int = 0  # newest tokens of a row, of which all others are unseen; 0 = none are for that
    overlaps: bool = True  # with the launch ahead, if that is all it comes behind

    @classmethod
    def fitting(
        cls,
        head_dim: int,
        group_size: int,
        block_tokens: int,
        dtype: torch.dtype,
        units: int,
        *,
        overlaps: bool = True,
        card: Card | None = None,
    ) -> AttendShape:
        """The variant for `units` = rows * KV heads, with rings as long as the card has room for.

        Args:
            head_dim: and the others, as the shape's.
            group_size: likewise.
            block_tokens: likewise.
            dtype: likewise.
            units: of the batch, padding included.
            overlaps: whether the launch may overlap with the one ahead.
            card: that is to run it; None = torch's current device.

        Raises:
            SetupError: the card has too little shared memory for any.
        """
        card = card or Card.current()
        dims = next(dims for most, dims in _DIMS_UNDER_WAY if units <= most)
        for depth in range(max(1, dims // head_dim), 0, -1):
            shape = cls(head_dim, group_size, block_tokens, dtype, depth, overlaps=overlaps)
            if shape.shared_bytes + _STATIC_BYTES <= card.shared_bytes:
                return shape
        raise card.refusal(
            f"attention of {group_size} query heads a KV head of {head_dim}",
            shape.shared_bytes + _STATIC_BYTES,
            "serve this model on a card with more, or run with --device cpu",
        )

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
            "WARPS": _WARPS,
            "DEPTH": self.depth,
            "WINDOW": self.window,
        }

    @property
    def shared_bytes(self) -> int:
        """What the sources lay out in shared memory."""
        part = -(-self.group_size * (self.head_dim + 6) * 4 // 16) * 16
        if self.dtype == torch.float32:
            threads_a_token = min(32, 1 << (self.head_dim // 4 - 1).bit_length())
            return part * _WARPS * 32 // threads_a_token
        return _WARPS * (self.depth * 16 * (4 * self.head_dim + 16) + part)

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            self.source,
            self.defines,
            threads=32 * _WARPS,
            cluster=1,
            shared_bytes=self.shared_bytes,
            overlaps=self.overlaps,
        )

    @cached_property
    def most_blocks(self) -> int:
        """Thread blocks that run at once on this device."""
        return self.kernel.most_clusters()

    def splits(self, top_k: int) -> int:
        """Into how many parts each lane's blocks are cut.

        It follows from the number of chosen tokens alone: a row's result depends on it in the last bits, and
        must not depend on how many other rows run.
        """
        return max(1, min(top_k, top_k * self.block_tokens // _SPLIT_TOKENS, _MOST_SPLITS))


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
    arrived: Tensor  # [rows * KV heads], zero; unused where lanes are not cut
    groups: int
    scaling: float
    splits: int  # parts that each lane's blocks are cut into; the result depends on it in the last bits
    lse: Tensor | None = None  # out [rows, query heads] float32: log of the sum of exp(score), if wanted

    @staticmethod
    def workspace(shape: AttendShape, units: int, splits: int) -> int:
        """Elements of `partial`; a lane that is not cut needs none."""
        if splits == 1:
            return 0
        return units * splits * shape.group_size * (shape.head_dim + 2)

    def launch(self, shape: AttendShape) -> None:
        """Launch on torch's current stream."""
        heads = self.pool.shape[3]
        units = self.slots.shape[0] * heads
        items = units * self.splits
        parameters = AttendParams(
            query=self.query.data_ptr(),
            pool=self.pool.data_ptr(),
            slots=self.slots.data_ptr(),
            selected=self.selected.data_ptr(),
            length=self.length.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            out=self.out.data_ptr(),
            lse=None if self.lse is None else self.lse.data_ptr(),
            sums=self.partial.data_ptr(),
            stats=self.partial.data_ptr() + items * shape.group_size * shape.head_dim * 4,
            arrived=self.arrived.data_ptr(),
            scaling=self.scaling,
            top_k=self.slots.shape[1],
            groups=self.groups,
            heads=heads,
            splits=self.splits,
            items=items,
        )
        shape.kernel.launch(min(items, shape.most_blocks), parameters)

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
        lse = self.lse
        if lse is not None and (
            lse.shape != self.query.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous()
        ):
            raise ValueError(f"lse must be contiguous float32 {list(self.query.shape[:2])}")
        units = self.slots.shape[0] * heads
        if self.partial.numel() < self.workspace(shape, units, self.splits):
            raise ValueError("partial is too small for this many rows and splits")
        if self.splits > 1 and self.arrived.numel() < units:
            raise ValueError("arrived is too small for this many rows")


def shape_for(
    query: Tensor, pool: Tensor, lanes: int, batch: DecodeBatch, *, overlaps: bool = True
) -> AttendShape:
    """The variant for a batch of so many lanes."""
    query_heads, head_dim = query.shape[1:]
    heads = pool.shape[3]
    group_size = query_heads // (batch.groups * heads)
    sizes = (head_dim, group_size, batch.block_tokens, query.dtype, lanes * heads)
    return AttendShape.fitting(*sizes, overlaps=overlaps)


def attended(
    shape: AttendShape,
    batch: DecodeBatch,
    query: Tensor,
    pool: Tensor,
    slots: Tensor,
    selected: Tensor,
    scaling: float,
    arrived: Tensor,
    lse: Tensor | None = None,
) -> AttendCall:
    """The call over a batch, its result still to be computed."""
    splits = shape.splits(slots.shape[1])
    workspace = AttendCall.workspace(shape, slots.shape[0] * pool.shape[3], splits)
    return AttendCall(
        query=query.contiguous(),
        pool=pool,
        slots=slots,
        selected=selected,
        length=batch.length,
        real_rows=batch.real_rows,
        out=torch.empty_like(query, memory_format=torch.contiguous_format),
        partial=torch.empty(workspace, dtype=torch.float32, device=query.device),
        arrived=arrived,
        groups=batch.groups,
        scaling=scaling,
        splits=splits,
        lse=lse,
    )
