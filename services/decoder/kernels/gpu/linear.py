"""Products of a few rows with a matrix on the GPU: shapes checked, a variant of linear.cu chosen, one launch.

The twin in kernels/linear.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.gpu.norm import ELEMENTS
from services.decoder.kernels.gpu.tensor_map import BYTES, COLUMNS, tensor_map

MOST_ROWS = 32  # with more, torch's products are faster (measured: docs/log.md)
_CHAINS = 8  # parts of each sum, as linear.cu defines them
_SHARED_BYTES = 225 * 1024  # of a multiprocessor from sm_90 on, less what barriers and the launches take
_SMALL_SHARED = 96 * 1024  # before sm_90
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
    cluster: int
    m_warps: int
    m_tiles: int
    slots: int
    ahead: int = 0
    resident: int = 1
    bulk: bool = True

    @classmethod
    def fitting(
        cls, rows: int, features: int, depth: int, gated: bool, dtype: torch.dtype
    ) -> LinearShape | None:
        """The variant for a product; None where torch is faster or no variant takes it.

        The widest tile in whose last round the device is nearly full, or else the one that fills it most.
        """
        if not 0 < rows <= MOST_ROWS or depth % 8 or features % 8:
            return None
        padded = max(8, 1 << (rows - 1).bit_length())
        if torch.cuda.get_device_capability()[0] < 9:
            return cls.filling(padded, gated, dtype, 1, 1, 1, bulk=False)
        units = torch.cuda.get_device_properties().multi_processor_count
        best, fullest = None, 0.0
        for m_tiles in _TILES:
            shape = cls.filling(padded, gated, dtype, 1, 1, m_tiles, resident=1)
            tiles = -(-features // shape.outputs)
            full = tiles / (units * -(-tiles // units))
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
        cluster: int,
        m_warps: int,
        m_tiles: int,
        *,
        resident: int = 2,
        ahead: int = 0,
        bulk: bool = True,
    ) -> LinearShape:
        """With as many slots as leave room for `resident` thread blocks on a multiprocessor."""
        budget = _SHARED_BYTES // resident
        if not bulk:
            budget = _SMALL_SHARED
        one = cls(rows, gated, dtype, cluster, m_warps, m_tiles, 0, ahead, resident, bulk)
        slots = (budget - one.shared_bytes) // one.slot_bytes
        return replace(one, slots=slots)

    @property
    def tile(self) -> int:
        """Rows of the weight that a cluster works on at a time."""
        return self.m_warps * self.m_tiles * 16

    @property
    def outputs(self) -> int:
        """Features of the result a tile."""
        return self.tile // 2 if self.gated else self.tile

    @property
    def k_warps(self) -> int:
        """Chains a thread block adds up."""
        return _CHAINS // self.cluster

    @property
    def threads(self) -> int:
        """Consumer warps and two producers."""
        return 32 * (self.k_warps * self.m_warps + 2)

    @property
    def slot_bytes(self) -> int:
        """A box of the weight and one of x."""
        return (self.tile + self.rows) * COLUMNS * 2

    @property
    def sum_bytes(self) -> int:
        """Of the chains' partial sums."""
        return self.k_warps * self.rows * (self.tile + 4) * 4

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
            "CLUSTER": self.cluster,
            "M_WARPS": self.m_warps,
            "M_TILES": self.m_tiles,
            "SLOTS": self.slots,
            "AHEAD": self.ahead,
            "RESIDENT": self.resident,
            "BULK": int(self.bulk),
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "linear",
            self.defines,
            threads=self.threads,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
            overlaps=True,
        )

    @cached_property
    def at_once(self) -> int:
        """Clusters that a launch may have, so that each has multiprocessors of its own where they fit."""
        most = torch.cuda.get_device_properties().multi_processor_count // self.cluster
        return most if self.cluster == 1 else min(most, self.kernel.most_clusters())

    def clusters(self, tiles: int) -> int:
        """Clusters of a launch: as many as share the tiles evenly."""
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
        shape.kernel.launch(shape.clusters(tiles) * shape.cluster, parameters)

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
