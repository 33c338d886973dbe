"""resolve on the GPU: shapes checked, a variant of resolve.cu chosen, one launch.

The twin in kernels/resolve.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.lru import LaneTables
from services.decoder.kernels.step_kernels import MissPlan, Split

_STATIC_BYTES = 3 * 1024
"""Of shared memory, that the kernel takes besides, and some to spare."""
_STRETCH = 8_192
"""Slots of the order that a thread block goes through without holding up the launch."""
_FEW = 512
"""Selections up to this size get thread blocks of 256 threads instead of 1,024."""
_WIDEST_CLUSTER = 8
_DEPTH = 4
_CHUNKS_IN_FLIGHT = 32_768
"""16-byte loads of a launch in flight: more thrash the address translation (docs/log.md)."""


class ResolveParams(ctypes.Structure):
    """As resolve.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "selected", "length", "seats", "real_rows", "slots", "open_slot",
            "block_to_slot", "slot_to_block", "order", "parcels", "capacity",
            "host_pages", "arena", "pool", "counters", "waited_until",
            "plan_source", "plan_target", "plan_count", "hits", "misses",
        )),
        *((name, ctypes.c_int32) for name in (
            "top_k", "groups", "max_blocks", "max_parcels", "max_pages", "blocks_per_page",
            "block_tokens", "copy_threads",
        )),
    ]  # fmt: skip


@dataclass(frozen=True)
class ResolveShape:
    """What a variant is compiled for."""

    block_bytes: int
    top_k: int
    parcels: int  # that one row can own
    parcel_slots: int
    cluster: int
    copy_threads: int = 128
    sweep: bool = False
    skip_io: bool = False

    @classmethod
    def fitting(
        cls,
        block_bytes: int,
        top_k: int,
        parcels: int,
        parcel_slots: int,
        lanes: int,
        *,
        skip_io: bool = False,
        card: Card | None = None,
    ) -> ResolveShape:
        """The widest cluster that leaves most of the device to the launches which overlap with this one.

        Measured on an H200 (docs/log.md). A long order makes it wider, as far as all lanes run at once.
        Without a `card` it is for torch's current device.

        Raises:
            SetupError: the capacity is more than the device's shared memory can order.
        """
        card = card or Card.current()
        blocks = card.multiprocessors  # thread blocks that surely run at once
        room = card.shared_bytes - _STATIC_BYTES
        cluster, widest = 1, _WIDEST_CLUSTER if card.has_clusters else 1
        while cluster < widest:
            wider = 2 * cluster
            if lanes * wider > blocks // (4 if top_k > _FEW else 2):
                narrow = cls(block_bytes, top_k, parcels, parcel_slots, cluster)
                long = narrow.max_capacity > cluster * _STRETCH and lanes * wider <= blocks
                if not long and narrow.shared_bytes <= room:
                    break
            cluster = wider
        chunks = _CHUNKS_IN_FLIGHT * (2 if block_bytes >= 4096 else 1)
        copiers = max(64, chunks // (_DEPTH * lanes * cluster) // 32 * 32)
        shape = cls(
            block_bytes,
            top_k,
            parcels,
            parcel_slots,
            cluster,
            min(1024, copiers),
            sweep=lanes >= 16,
            skip_io=skip_io,
        )
        if shape.shared_bytes > room:
            raise card.refusal(
                f"ordering a lane of {shape.max_capacity:,} hot slots, {top_k:,} of them chosen in a step,",
                shape.shared_bytes + _STATIC_BYTES,
                "lower --max-model-len, --budget-tokens or --dense-layers",
            )
        return shape

    @staticmethod
    def most_slots(top_k: int, parcel_slots: int, card: Card | None = None) -> int:
        """The widest lane that the card can order by any variant; not positive where it can order none."""
        card = card or Card.current()
        words = (card.shared_bytes - _STATIC_BYTES) // 4 - _words(top_k) - 6  # of what is rounded up
        a_slot = 1 / (_WIDEST_CLUSTER if card.has_clusters else 1) + 1 / 32 + 1 / parcel_slots
        return int(words / a_slot) // parcel_slots * parcel_slots

    @property
    def max_capacity(self) -> int:
        """Slots of the widest lane."""
        return self.parcels * self.parcel_slots

    @property
    def threads(self) -> int:
        """Few for small selections, so that several lanes share a multiprocessor."""
        return 1024 if self.top_k > _FEW else 256

    @property
    def id_tiles(self) -> int:
        """Ids a thread looks up."""
        return -(-self.top_k // self.threads)

    @property
    def hash_slots(self) -> int:
        """A power of two, about half full when everything misses."""
        return _hash_slots(self.top_k)

    @property
    def split(self) -> bool:
        """Large blocks are shared out among a cluster, in parts of whole cache lines."""
        part, rest = divmod(self.block_bytes, self.cluster)
        return rest == 0 and part >= 512 and part % 128 == 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as resolve.cu lays it out."""
        stretch = -(-self.max_capacity // self.cluster)
        stretch += -stretch % 4
        words = stretch + _words(self.top_k) + self.parcels
        return 4 * (words + -(-self.max_capacity // 32))

    @property
    def defines(self) -> dict[str, int]:
        """The constants that resolve.cu's head asks for."""
        return {
            "BLOCK_BYTES": self.block_bytes,
            "CLUSTER": self.cluster,
            "THREADS": self.threads,
            "ID_TILES": self.id_tiles,
            "HASH_SLOTS": self.hash_slots,
            "COPY_DEPTH": _DEPTH,
            "PARCEL_SLOTS": self.parcel_slots,
            "SPLIT": int(self.split),
            "SWEEP": int(self.sweep),
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
            overlaps=True,
        )


def _hash_slots(top_k: int) -> int:
    return 1 << (2 * top_k - 1).bit_length()


def _words(top_k: int) -> int:
    """Of shared memory, that follow from the selection alone."""
    return 2 * _hash_slots(top_k) + 4 * top_k + 2


@dataclass(frozen=True, slots=True)
class ResolveCall:
    """One layer's launch: everything but the variant. All tensors int32 on the device unless said.

    `seats`, `length`, `real_rows`, `tables.parcels` and `tables.capacity` are read before the kernel ahead
    has ended: within a step nothing may write them.
    """

    tables: LaneTables
    selected: Tensor  # [rows * groups, top_k]
    length: Tensor  # [rows] tokens, the newest included
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
    block_tokens: int
    waited_until: Tensor | None = None  # [1] int64, shared by all layers; without it no time is counted
    plan: MissPlan | None = None  # out [rows * groups, ...], for layers that share the tables
    split: Split | None = None  # out

    def launch(self, shape: ResolveShape) -> None:
        """Launch on torch's current stream."""
        tables, plan, split = self.tables, self.plan, self.split
        parameters = ResolveParams(
            selected=self.selected.data_ptr(),
            length=self.length.data_ptr(),
            seats=self.seats.data_ptr(),
            real_rows=self.real_rows.data_ptr(),
            slots=self.slots.data_ptr(),
            open_slot=self.open_slot.data_ptr(),
            block_to_slot=tables.block_to_slot.data_ptr(),
            slot_to_block=tables.slot_to_block.data_ptr(),
            order=tables.order.data_ptr(),
            parcels=tables.parcels.data_ptr(),
            capacity=tables.capacity.data_ptr(),
            host_pages=self.host_pages.data_ptr(),
            arena=self.arena_pointer,
            pool=self.pool.data_ptr(),
            counters=self.counters.data_ptr(),
            waited_until=None if self.waited_until is None else self.waited_until.data_ptr(),
            plan_source=None if plan is None else plan.source.data_ptr(),
            plan_target=None if plan is None else plan.target.data_ptr(),
            plan_count=None if plan is None else plan.count.data_ptr(),
            hits=None if split is None else split.hits.data_ptr(),
            misses=None if split is None else split.misses.data_ptr(),
            top_k=shape.top_k,
            groups=self.groups,
            max_blocks=tables.block_to_slot.shape[1],
            max_parcels=shape.parcels,
            max_pages=self.host_pages.shape[1],
            blocks_per_page=self.blocks_per_page,
            block_tokens=self.block_tokens,
            copy_threads=min(shape.copy_threads, shape.threads - shape.threads // 8),
        )
        shape.kernel.launch(self.selected.shape[0] * shape.cluster, parameters)

    def check(self, shape: ResolveShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or device that is off, by name.
        """
        named = {name: getattr(self, name) for name in (
            "selected", "length", "seats", "real_rows", "host_pages", "slots", "open_slot",
        )}  # fmt: skip
        named |= {name: getattr(self.tables, name) for name in (
            "block_to_slot", "slot_to_block", "order", "parcels", "capacity",
        )}  # fmt: skip
        if self.plan is not None:
            named |= {f"plan.{name}": getattr(self.plan, name) for name in ("source", "target", "count")}
            for name in ("source", "target"):
                if getattr(self.plan, name).shape != self.selected.shape:
                    raise ValueError(f"plan.{name} must be {list(self.selected.shape)}, as selected is")
            if self.plan.count.shape != self.selected.shape[:1]:
                raise ValueError(f"plan.count must be [{self.selected.shape[0]}]")
        if self.split is not None:
            named |= {"split.hits": self.split.hits, "split.misses": self.split.misses}
            if self.plan is None:
                raise ValueError("a split needs a plan: its misses stand as the plan's fetches do")
            if not self.split.hits.shape == self.split.misses.shape == self.selected.shape:
                raise ValueError(f"both halves of split must be {list(self.selected.shape)}, as selected is")
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
        if self.tables.parcels.shape[1] != shape.parcels or self.tables.parcel_slots != shape.parcel_slots:
            raise ValueError(
                f"tables must have {shape.parcels} parcels a row of {shape.parcel_slots} slots, as the shape"
            )
        if self.tables.groups != self.groups or self.tables.order.shape[0] != self.pool.shape[0]:
            raise ValueError(f"tables must be of {self.groups} groups and {self.pool.shape[0]} pool slots")
