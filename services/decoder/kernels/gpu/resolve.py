"""resolve on the GPU: shapes checked, a variant of resolve.cu chosen, one launch.

The twin in kernels/resolve.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.lru import LaneTables


class ResolveParams(ctypes.Structure):
    """As resolve.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "selected", "open_block", "seats", "real_rows", "slots", "open_slot",
            "block_to_slot", "slot_to_block", "order", "resident", "pool_slot",
            "host_pages", "arena", "pool", "counters",
        )),
        *((name, ctypes.c_int32) for name in (
            "top_k", "groups", "max_blocks", "max_capacity", "max_pages", "blocks_per_page",
        )),
    ]  # fmt: skip


@dataclass(frozen=True)
class ResolveShape:
    """What a variant is compiled for."""

    block_bytes: int
    top_k: int
    max_capacity: int
    cluster: int
    copy_threads: int = 256
    copy_depth: int = 4
    skip_io: bool = False

    @classmethod
    def fitting(
        cls, block_bytes: int, top_k: int, max_capacity: int, lanes: int, *, skip_io: bool = False
    ) -> ResolveShape:
        """The widest cluster with which all lanes still run at once; a single block where none does."""
        # Few lanes need every thread to fill the link; with many, more reads in flight gain nothing
        # (measured: docs/log.md).
        copy_threads = 1024 if lanes <= 8 else 256
        for cluster in (8, 4, 2):
            shape = cls(block_bytes, top_k, max_capacity, cluster, copy_threads, skip_io=skip_io)
            if lanes <= shape.kernel.most_clusters():
                return shape
        return cls(block_bytes, top_k, max_capacity, 1, copy_threads, skip_io=skip_io)

    @property
    def threads(self) -> int:
        """Few for small selections, so that several lanes share a multiprocessor."""
        return 1024 if self.top_k > 512 else 256

    @property
    def id_tiles(self) -> int:
        """Ids a thread looks up."""
        return -(-self.top_k // self.threads)

    @property
    def hash_slots(self) -> int:
        """A power of two, about half full when everything misses."""
        return 1 << (2 * self.top_k - 1).bit_length()

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as resolve.cu lays it out."""
        warps = self.threads // 32
        stretch = -(-self.max_capacity // self.cluster)
        tiles = -(-stretch // self.threads)
        words = 2 * self.hash_slots + 3 * (self.top_k + 1) + self.id_tiles * warps + 2 * tiles * warps
        return 4 * (words + stretch + -(-self.max_capacity // 32))

    @property
    def defines(self) -> dict[str, int]:
        """The constants that resolve.cu's head asks for."""
        return {
            "BLOCK_BYTES": self.block_bytes,
            "CLUSTER": self.cluster,
            "THREADS": self.threads,
            "ID_TILES": self.id_tiles,
            "HASH_SLOTS": self.hash_slots,
            "COPY_THREADS": min(self.copy_threads, self.threads),
            "COPY_DEPTH": self.copy_depth,
            "SKIP_IO": int(self.skip_io),
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "resolve",
            self.defines,
            threads=self.threads,
            cluster=self.cluster,
            shared_bytes=self.shared_bytes,
        )


@dataclass(frozen=True, slots=True)
class ResolveCall:
    """One layer's launch: everything but the variant. All tensors int32 on the device unless said."""

    tables: LaneTables
    selected: Tensor  # [rows * groups, top_k]
    open_block: Tensor  # [rows]
    seats: Tensor  # [rows]
    real_rows: Tensor  # [1]
    host_pages: Tensor  # [table rows, max_pages]
    arena_pointer: int  # of the layer's first block, as the device addresses it
    pool: Tensor  # [pool slots, block elements], any dtype
    counters: Tensor  # [6] int64
    slots: Tensor  # out [rows * groups, top_k]
    open_slot: Tensor  # out [rows * groups]
    groups: int
    blocks_per_page: int

    def launch(self, shape: ResolveShape) -> None:
        """Launch on torch's current stream."""
        tables = self.tables
        parameters = ResolveParams(
            selected=self.selected.data_ptr(),
            open_block=self.open_block.data_ptr(),
            seats=self.seats.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            slots=self.slots.data_ptr(),
            open_slot=self.open_slot.data_ptr(),
            block_to_slot=tables.block_to_slot.data_ptr(),
            slot_to_block=tables.slot_to_block.data_ptr(),
            order=tables.order.data_ptr(),
            resident=tables.resident.data_ptr(),
            pool_slot=tables.pool_slot.data_ptr(),
            host_pages=self.host_pages.data_ptr(),
            arena=self.arena_pointer,
            pool=self.pool.data_ptr(),
            counters=self.counters.data_ptr(),
            top_k=shape.top_k,
            groups=self.groups,
            max_blocks=tables.block_to_slot.shape[1],
            max_capacity=tables.order.shape[1],
            max_pages=self.host_pages.shape[1],
            blocks_per_page=self.blocks_per_page,
        )
        shape.kernel.launch(self.selected.shape[0] * shape.cluster, parameters)

    def check(self, shape: ResolveShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or device that is off, by name.
        """
        named = {name: getattr(self, name) for name in (
            "selected", "open_block", "seats", "real_rows", "host_pages", "slots", "open_slot",
        )}  # fmt: skip
        named |= {name: getattr(self.tables, name) for name in (
            "block_to_slot", "slot_to_block", "order", "resident", "pool_slot",
        )}  # fmt: skip
        for name, tensor in named.items():
            if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device.type != "cuda":
                raise ValueError(f"{name} must be a contiguous int32 tensor on the GPU, is {tensor.dtype}")
        if (
            self.pool.shape[1] * self.pool.element_size() != shape.block_bytes
            or not self.pool.is_contiguous()
        ):
            raise ValueError(f"pool rows must be {shape.block_bytes} contiguous bytes")
        if self.selected.shape[1] != shape.top_k or self.slots.shape != self.selected.shape:
            raise ValueError(f"selected and slots must be [lanes, {shape.top_k}]")
        if self.counters.dtype != torch.int64 or self.counters.shape != (6,):
            raise ValueError("counters must be [6] int64")
