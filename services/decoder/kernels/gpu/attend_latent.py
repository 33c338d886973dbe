"""Decode attention over latent records (MLA) on the GPU: shapes checked, a variant chosen, one launch.

The twin in kernels/attend_latent.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.record_code import coded_bytes

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PLAIN_WARPS = 4
_STATIC_BYTES = 1024
"""Of shared memory, that the kernel takes besides, and some to spare."""
_VARIANTS = (
    (64, 8, 32, 3, 2, 4, 128),
    (32, 8, 32, 2, 2, 4, 64),
    (32, 8, 32, 1, 2, 4, 64),
    (16, 4, 32, 1, 1, 4, 64),
)
"""head_tile, warps, tokens, depth, head_warps, slices, split_tokens; best first (docs/log.md has what was
tried; the third is for cards with less shared memory than an H200, and was not timed)."""


class AttendLatentParams(ctypes.Structure):
    """As attend_latent.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "query", "pool", "slots", "selected", "length", "real_rows", "out", "lse", "sums", "stats",
            "arrived",
        )),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("top_k", "heads", "splits")),
    ]  # fmt: skip


@dataclass(frozen=True)
class AttendLatentShape:
    """What a variant is compiled for."""

    latent: int
    roped: int
    head_tile: int  # heads of one thread block: 16, 32 or 64
    block_tokens: int
    dtype: torch.dtype
    cluster: int  # thread blocks whose parts meet in shared memory; 1 before sm_90
    warps: int
    tokens: int  # that pass through shared memory together
    depth: int  # times as many are under way
    head_warps: int  # the scores' split over warps: by heads,
    slices: int  # by a record's length, and by tokens
    split_tokens: int
    coded: bool = False  # records are kernels/record_code.py's, `dtype` is the query's
    overlaps: bool = True  # with the launch ahead, if that is all it comes behind

    @classmethod
    def fitting(
        cls,
        latent: int,
        roped: int,
        heads: int,
        block_tokens: int,
        dtype: torch.dtype,
        cluster: int,
        *,
        coded: bool = False,
        card: Card | None = None,
    ) -> AttendLatentShape:
        """The variant for so many query heads: the widest tile of them that is not half empty, and fits.

        Without a `card` it is for torch's current device. Nothing was tuned for coded records.

        Raises:
            SetupError: the card has too little shared memory for any.
        """
        card = card or Card.current()
        for head_tile, warps, tokens, depth, head_warps, slices, split_tokens in _VARIANTS:
            sizes = (latent, roped, head_tile, block_tokens, dtype, cluster)
            shape = cls(*sizes, warps, tokens, depth, head_warps, slices, split_tokens, coded)
            wide = head_tile > 16 and heads <= head_tile // 2
            if not wide and shape.shared_bytes + _STATIC_BYTES <= card.shared_bytes:
                return shape
        raise card.refusal(
            f"attention over records of {latent} + {roped}",
            shape.shared_bytes + _STATIC_BYTES,
            "serve this model on a card with more, or run with --device cpu",
        )

    @staticmethod
    def takes(latent: int, roped: int, dtype: torch.dtype) -> bool:
        """Whether every variant of `fitting` can do these records; PlainLatentShape does all others."""
        return dtype != torch.float32 and latent % 128 == 0 and (latent + roped) % 64 == 0

    def splits(self, top_k: int) -> int:
        """Into how many parts each row's blocks are cut; of the chosen tokens alone, as attend.py says."""
        return self.cluster * max(1, top_k * self.block_tokens // (self.split_tokens * self.cluster))

    @property
    def defines(self) -> dict[str, int]:
        """The constants that attend_latent.cu's head asks for."""
        return {
            "LATENT": self.latent,
            "ROPED": self.roped,
            "CODED": int(self.coded),
            "HEAD_TILE": self.head_tile,
            "BLOCK_TOKENS": self.block_tokens,
            "ELEMENT": _ELEMENTS[self.dtype],
            "TOKENS": self.tokens,
            "DEPTH": self.depth,
            "WARPS": self.warps,
            "HEAD_WARPS": self.head_warps,
            "SLICES": self.slices,
            "CLUSTER": self.cluster,
        }

    @property
    def shared_bytes(self) -> int:
        """The source's struct Shared."""
        record = (self.latent + self.roped) * 2 + 16
        scores = self.slices * self.head_tile * (self.tokens + 4) * 4
        weights = self.head_tile * (self.tokens * 2 + 16)
        coming = coded_bytes(self.latent, self.roped) if self.coded else record
        wide = self.tokens * record if self.coded else 16
        chunks = self.depth * self.tokens * (coming + 1) + wide
        return self.head_tile * record + chunks + scores + weights + self.head_tile * 12

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "attend_latent",
            self.defines,
            threads=32 * self.warps,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
            overlaps=self.overlaps,
        )


@dataclass(frozen=True)
class PlainLatentShape:
    """A variant of attend_latent_plain.cu, for what attend_latent.cu does not take; a thread block a head."""

    latent: int  # a multiple of 4
    roped: int
    block_tokens: int
    dtype: torch.dtype
    most_tokens: int  # of a row's blocks together
    coded: bool = False  # as AttendLatentShape's
    overlaps: bool = True  # as AttendLatentShape's

    head_tile: ClassVar[int] = 1
    cluster: ClassVar[int] = 1

    def splits(self, top_k: int) -> int:
        """None is cut."""
        return 1

    @property
    def defines(self) -> dict[str, int]:
        """The constants that attend_latent_plain.cu's head asks for."""
        return {
            "LATENT": self.latent,
            "ROPED": self.roped,
            "CODED": int(self.coded),
            "BLOCK_TOKENS": self.block_tokens,
            "ELEMENT": _ELEMENTS[self.dtype],
            "WARPS": _PLAIN_WARPS,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "attend_latent_plain",
            self.defines,
            threads=32 * _PLAIN_WARPS,
            cluster=1,
            shared_bytes=4 * self.most_tokens,
            overlaps=self.overlaps,
        )


LatentVariant = AttendLatentShape | PlainLatentShape


@dataclass(frozen=True, slots=True)
class AttendLatentCall:
    """One layer's launch. Index tensors are int32; everything lies on the device."""

    query: Tensor  # [rows, heads, latent + roped]
    pool: Tensor  # [pool slots, block_tokens, latent + roped], or coded: uint8
    slots: Tensor  # [rows, top_k], -1 = none
    selected: Tensor  # [rows, top_k], -1 = none
    length: Tensor  # [rows]
    real_rows: Tensor  # [1]
    out: Tensor  # [rows, heads, latent]
    partial: Tensor  # float32 workspace, at least `workspace` elements
    arrived: Tensor  # at least `arrivals` elements, zero
    scaling: float
    splits: int  # parts of a row's blocks, a multiple of the shape's cluster; the result depends on it
    lse: Tensor | None = None  # out [rows, heads] float32: log of the sum of exp(score), where it is wanted

    @staticmethod
    def units(shape: LatentVariant, rows: int, heads: int) -> int:
        """Groups of heads that thread blocks serve."""
        return rows * -(-heads // shape.head_tile)

    @classmethod
    def workspace(cls, shape: LatentVariant, rows: int, heads: int, splits: int) -> int:
        """Elements of `partial`; none where a row's parts all meet in one cluster."""
        if splits == shape.cluster:
            return 0
        parts = cls.units(shape, rows, heads) * splits * shape.head_tile
        return parts // shape.cluster * shape.latent + parts * 2

    @classmethod
    def arrivals(cls, shape: LatentVariant, rows: int, heads: int) -> int:
        """Elements of `arrived` where the workspace is not empty."""
        return cls.units(shape, rows, heads) * shape.cluster

    def launch(self, shape: LatentVariant) -> None:
        """Launch on torch's current stream."""
        rows, heads = self.query.shape[:2]
        blocks = self.units(shape, rows, heads) * self.splits
        sums = blocks // shape.cluster * shape.head_tile * shape.latent
        parameters = AttendLatentParams(
            query=self.query.data_ptr(),
            pool=self.pool.data_ptr(),
            slots=self.slots.data_ptr(),
            selected=self.selected.data_ptr(),
            length=self.length.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            out=self.out.data_ptr(),
            lse=None if self.lse is None else self.lse.data_ptr(),
            sums=self.partial.data_ptr(),
            stats=self.partial.data_ptr() + sums * 4,
            arrived=self.arrived.data_ptr(),
            scaling=self.scaling,
            top_k=self.slots.shape[1],
            heads=heads,
            splits=self.splits,
        )
        shape.kernel.launch(blocks, parameters)

    def check(self, shape: LatentVariant) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        rows, heads = self.query.shape[:2]
        record = shape.latent + shape.roped
        kept = torch.uint8 if shape.coded else shape.dtype
        wide = coded_bytes(shape.latent, shape.roped) if shape.coded else record
        if self.pool.shape[1:] != (shape.block_tokens, wide):
            raise ValueError(f"pool must be [slots, {shape.block_tokens}, {wide}]")
        if self.query.shape[2] != record or self.out.shape != (rows, heads, shape.latent):
            raise ValueError(f"query must be [rows, heads, {record}], out [rows, heads, {shape.latent}]")
        for name, dtype in (("query", shape.dtype), ("pool", kept), ("out", shape.dtype)):
            if getattr(self, name).dtype != dtype or not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} must be contiguous {dtype}")
        for name in ("slots", "selected", "length", "real_rows", "arrived"):
            if getattr(self, name).dtype != torch.int32 or not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} must be contiguous int32")
        if (
            isinstance(shape, PlainLatentShape)
            and self.slots.shape[1] * shape.block_tokens > shape.most_tokens
        ):
            raise ValueError(f"slots must hold {shape.most_tokens} tokens a row at most")
        if self.slots.shape[0] != rows or self.slots.shape != self.selected.shape:
            raise ValueError(f"slots and selected must both be [{rows}, top_k]")
        if self.splits < 1 or self.splits % shape.cluster:
            raise ValueError(f"splits must be a multiple of the cluster's {shape.cluster} thread blocks")
        if self.partial.numel() < self.workspace(shape, rows, heads, self.splits):
            raise ValueError("partial is too small for this many rows, heads and splits")
        lse = self.lse
        if lse is not None and (lse.shape != (rows, heads) or lse.dtype != torch.float32):
            raise ValueError(f"lse must be [{rows}, {heads}] float32")
        if self.splits == shape.cluster:
            return  # nothing meets in global memory
        if self.arrived.numel() < self.arrivals(shape, rows, heads):
            raise ValueError("arrived is too small for this many rows and heads")
