"""Products of a few rows with a matrix on the GPU: shapes checked, a variant of linear.cu chosen, one launch.

The twin in kernels/linear.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.gpu.norm import ELEMENTS
from services.decoder.kernels.gpu.tensor_map import BYTES, COLUMNS, tensor_map

MOST_ROWS = 32  # with more, torch's products are faster (measured: docs/log.md)
_CHAINS = 8  # parts of each sum, as linear.cu defines them
_STATIC_BYTES = 2 * 1024  # of shared memory, for barriers, and some to spare
_PLAIN_BYTES = 96 * 1024  # of it at most, where plain copies fill it
_FULL = 0.9
# Tiles of 16 weight rows a thread block, best first: wide ones spare reads of x. One thread block a
# multiprocessor with all of its shared memory beats two, and clusters gain nothing (measured: docs/log.md).
_TILES = (3, 2, 1)


class LinearParams(ctypes.Structure):
    """As linear.cu's struct, field by field."""

    _fields_ = [
        ("weight_map", ctypes.c_byte * BYTES),
        ("x_map", ctypes.c_byte * BYTES),
        *((name, ctypes.c_void_p) for name in ("weight", "x", "bias", "out")),
        *((name, ctypes.c_int32) for name in ("rows", "features", "depth", "tiles")),
        ("unused", ctypes.c_uint64 * 2),
    ]


@dataclass(frozen=True)
class LinearShape:
    """What a variant is compiled for, as linear.cu's head says."""

    rows: int  # 8, 16, 32 or 64
    gated: bool
    dtype: torch.dtype
    m_tiles: int
    slots: int
    bulk: bool = True

    @classmethod
    def fitting(
        cls,
        rows: int,
        features: int,
        depth: int,
        gated: bool,
        dtype: torch.dtype,
        *,
        card: Card | None = None,
    ) -> LinearShape | None:
        """The variant for a product; None where torch is faster or no variant takes it or fits.

        The widest tile in whose last round the device is nearly full, or else the one that fills it most.
        Without a `card` it is for torch's current device.
        """
        if not 0 < rows <= MOST_ROWS or depth % 8 or features % 8:
            return None
        padded = max(8, 1 << (rows - 1).bit_length())
        card = card or Card.current()
        best, fullest = None, 0.0
        for m_tiles in _TILES if card.has_clusters else (1,):
            shape = cls.filling(padded, gated, dtype, m_tiles, bulk=card.has_clusters, card=card)
            if shape.slots < _CHAINS:
                continue
            tiles = -(-features // shape.outputs)
            full = tiles / (card.multiprocessors * -(-tiles // card.multiprocessors))
            if full > fullest:
                best, fullest = shape, full
            if fullest >= _FULL:
                break
        return best

    @classmethod
    def filling(
        cls,
        rows: int,
        gated: bool,
        dtype: torch.dtype,
        m_tiles: int,
        *,
        bulk: bool = True,
        card: Card | None = None,
    ) -> LinearShape:
        """With as many slots as shared memory has room for; the kernel needs eight."""
        room = (card or Card.current()).shared_bytes - _STATIC_BYTES
        if not bulk:
            room = min(room, _PLAIN_BYTES)
        one = cls(rows, gated, dtype, m_tiles, 0, bulk)
        return replace(one, slots=(room - one.shared_bytes) // one.slot_bytes)

    @property
    def tile(self) -> int:
        """Rows of the weight that a thread block works on at a time."""
        return self.m_tiles * 16

    @property
    def outputs(self) -> int:
        """Features of the result a tile."""
        return self.tile // 2 if self.gated else self.tile

    @property
    def slot_bytes(self) -> int:
        """A box of the weight and one of x."""
        return (self.tile + self.rows) * COLUMNS * 2

    @property
    def sum_bytes(self) -> int:
        """Of the chains' partial sums."""
        return _CHAINS * self.rows * (self.tile + 4) * 4

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as linear.cu lays it out, with room to begin at a multiple of 1,024."""
        return 1024 + self.slots * self.slot_bytes + self.sum_bytes

    @property
    def defines(self) -> dict[str, int]:
        """The constants that linear.cu's head asks for."""
        return {
            "ELEMENT": ELEMENTS[self.dtype],
            "ROWS": self.rows,
            "GATED": int(self.gated),
            "M_TILES": self.m_tiles,
            "SLOTS": self.slots,
            "BULK": int(self.bulk),
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "linear",
            self.defines,
            threads=32 * (_CHAINS + 2),  # a consumer warp a chain, and two producers
            cluster=1,
            shared_bytes=self.shared_bytes,
            overlaps=True,
        )

    @cached_property
    def at_once(self) -> int:
        """Thread blocks that a launch may have, so that each has a multiprocessor of its own."""
        return Card.current().multiprocessors

    def thread_blocks(self, tiles: int) -> int:
        """Of a launch: as many as share the tiles evenly."""
        return -(-tiles // -(-tiles // self.at_once))


@dataclass(frozen=True, slots=True)
class LinearCall:
    """One launch; everything contiguous on the device, of one dtype."""

    x: Tensor  # [rows, depth]
    weight: Tensor  # [features, depth]; gated [2 * features, depth], the gate's rows first
    bias: Tensor | None  # [features]; not with gated
    out: Tensor  # [rows, features]

    def launch(self, shape: LinearShape) -> None:
        """Launch on torch's current stream."""
        rows, depth = self.x.shape
        features = self.out.shape[1]
        tiles = -(-features // shape.outputs)
        parameters = LinearParams(
            weight=self.weight.data_ptr(),
            x=self.x.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            out=self.out.data_ptr(),
            rows=rows,
            features=features,
            depth=depth,
            tiles=tiles,
        )
        if shape.bulk:
            parameters.weight_map[:] = tensor_map(self.weight, shape.outputs)
            parameters.x_map[:] = tensor_map(self.x, shape.rows)
        shape.kernel.launch(shape.thread_blocks(tiles), parameters)

    def check(self, shape: LinearShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        rows, depth = self.x.shape
        features = self.out.shape[1]
        if not 0 < rows <= shape.rows:
            raise ValueError(f"x must have 1 to {shape.rows} rows, has {rows}")
        if depth % 8 or features % 8:
            raise ValueError(f"depth and features must be multiples of 8, not {depth} and {features}")
        if shape.gated and self.bias is not None:
            raise ValueError("a gated product takes no bias")
        wanted = {
            "x": (rows, depth),
            "weight": ((2 if shape.gated else 1) * features, depth),
            "bias": (features,),
            "out": (rows, features),
        }
        for name, size in wanted.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != size or tensor.dtype != shape.dtype or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous {shape.dtype} {list(size)}")
            if tensor.data_ptr() % 16:
                raise ValueError(f"{name} must begin at a multiple of 16 bytes")
