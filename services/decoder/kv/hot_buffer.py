"""The hot buffer: a pool of hot slots a layer, and the tables that say whose each slot is.

Knows rows and their parcels; who gets how many is engine/capacity_book.py's decision, the LRU and the
fetches are kernels. Calls come in the order of the steps on one stream, so a parcel that one row gives up is
another's behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.kernels.lanes import (
    Changes,
    Moves,
    empty_tables,
    grow,
    layer_of,
    leave,
    seat,
    shrink,
)
from services.decoder.kernels.lru import LaneTables
from services.decoder.kernels.upload import upload
from services.decoder.kv.hot_class import HotClass, Resize
from services.decoder.kv.shape import KvShape

_MOVED_BYTES = 64 * 2**20
"""Blocks that change their slot pass through a buffer of this size, at most, or of one block a lane."""
_ENTRIES_AT_ONCE = 2**21
"""Slots of rows, over all layers, that are worked on at once: some ten tables of 8 bytes each, 170 MB."""


class _Change(NamedTuple):
    row: int
    before: int  # slots of a lane
    after: int


class HotBuffer:
    """Pools and tables of all classes of layers; `pools` and `tables` have one entry a layer."""

    def __init__(
        self, shape: KvShape, rows: int, max_blocks: int, classes: Sequence[HotClass], device: torch.device
    ) -> None:
        self.shape = shape
        self.classes = tuple(classes)
        self.pools: list[Tensor] = []  # [pool slots, block elements]
        self.tables: list[LaneTables] = []
        self._stacked_pools: list[Tensor] = []  # a class: [layers, pool slots, block elements]
        self._stacked: list[LaneTables] = []
        self._tables_of: list[Tensor] = []  # a class: [layers] int64, which of the stacked tables are its
        self._parcels: list[
            dict[int, list[int]]
        ] = []  # a class: row -> its parcels, in the order of its slots
        self._seated: set[int] = set()
        for each in self.classes:
            slots = each.pool_slots(shape.groups)
            pool = torch.zeros(
                each.layers, slots, shape.block_elements, dtype=shape.record_dtype, device=device
            )
            first = len(self.pools)
            own = [shape.chooses(layer) for layer in range(first, first + each.layers)]
            tables_of = [count - 1 for count in accumulate(own)]
            tables = empty_tables(
                each.layers - each.followers,
                rows,
                shape.groups,
                max_blocks,
                each.parcels,
                each.parcel_slots,
                each.most,
                device,
            )
            self._stacked_pools.append(pool)
            self._stacked.append(tables)
            self.pools += pool.unbind(0)
            self.tables += [layer_of(tables, place) for place in tables_of]
            self._tables_of.append(torch.tensor(tables_of, device=device))
            self._parcels.append({})

    def resize(self, resizes: Sequence[Resize]) -> None:
        """Let rows own other parcels; who loses some comes before whoever gets them.

        Raises:
            ValueError: parcels that are neither the first ones of a row's nor all of them and more.
        """
        shrinking: list[list[_Change]] = [[] for _ in self.classes]
        growing: list[list[_Change]] = [[] for _ in self.classes]
        given: list[list[tuple[int, int, int]]] = [[] for _ in self.classes]  # row, place, parcel
        for number, row, parcels in resizes:
            held = self._parcels[number].get(row, [])
            keeps = min(len(held), len(parcels))
            if not parcels or held[:keeps] != list(parcels[:keeps]):
                raise ValueError(f"row {row} has parcels {held} and cannot change to {list(parcels)}")
            given[number] += [(row, place, parcels[place]) for place in range(keeps, len(parcels))]
            if row in self._seated and len(parcels) != len(held):
                size = self.classes[number].parcel_slots
                change = _Change(row, len(held) * size, len(parcels) * size)
                (growing if len(parcels) > len(held) else shrinking)[number].append(change)
            self._parcels[number][row] = list(parcels)
        device = self.pools[0].device
        for number, tables in enumerate(self._stacked):
            for changes in self._together(number, shrinking[number]):
                self._move(number, shrink(tables, changes))
            if given[number]:
                row, place, parcel = upload(list(zip(*given[number], strict=True)), device)
                tables.parcels[row, place] = parcel.int()
            for changes in self._together(number, growing[number]):
                grow(tables, changes)

    def _together(self, number: int, changes: list[_Change]) -> Iterator[Changes]:
        """In as few calls as the memory that each takes allows."""
        lanes = self.classes[number].layers * self.shape.groups
        rest = sorted(changes, key=lambda change: max(change.before, change.after))
        while rest:
            count = 1
            while count < len(rest):
                widest = max(rest[count].before, rest[count].after)
                if lanes * (count + 1) * widest > _ENTRIES_AT_ONCE:
                    break
                count += 1
            yield Changes.of(rest[:count], self.pools[0].device)
            rest = rest[count:]

    def seat(self, row: int, opened: int) -> None:
        """Let a row that was given its parcels begin, with block `opened` in the first slot of every lane.

        Raises:
            ValueError: it sits already, or lacks parcels.
        """
        if row in self._seated or not all(row in held for held in self._parcels):
            raise ValueError(f"row {row} sits already, or has no parcels")
        self._seated.add(row)
        for tables, each, held in zip(self._stacked, self.classes, self._parcels, strict=True):
            seat(tables, row, len(held[row]) * each.parcel_slots, opened)

    def leave(self, row: int) -> None:
        """Take every parcel from `row`; one that has none is ignored."""
        for tables, held in zip(self._stacked, self._parcels, strict=True):
            held.pop(row, None)
            if row in self._seated:
                leave(tables, row)
        self._seated.discard(row)

    def open_slots(self, row: int) -> list[Tensor]:
        """A layer: [groups] int64 pool slots of the open block of a row just seated."""
        groups, found = self.shape.groups, []
        lanes = torch.arange(row * groups, (row + 1) * groups, device=self.pools[0].device)
        for tables, each in zip(self._stacked, self.classes, strict=True):
            found += [tables.places(lanes, tables.parcel_slots)[:, 0]] * each.layers
        return found

    @property
    def slots_total(self) -> int:
        """Hot slots of all layers."""
        return sum(pool.shape[0] for pool in self.pools)

    @property
    def slots_used(self) -> int:
        """Of these, owned by lanes."""
        return sum(
            each.layers * each.parcel_slots * self.shape.groups * sum(map(len, held.values()))
            for each, held in zip(self.classes, self._parcels, strict=True)
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every parcel is free or owned once and tables agree with each other."""
        for tables, each, held in zip(self._stacked, self.classes, self._parcels, strict=True):
            owned = [parcel for parcels in held.values() for parcel in parcels]
            assert len(set(owned)) == len(owned), "a parcel is owned twice"
            assert set(owned) <= set(range(each.parcels)), "a parcel that does not exist is owned"
            for row in range(tables.capacity.shape[0]):
                parcels = held[row] if row in self._seated else []
                self._check_row(tables, row, parcels)

    def _check_row(self, tables: LaneTables, row: int, parcels: list[int]) -> None:
        """Of one row, whose capacity must be that of `parcels`."""
        slots = len(parcels) * tables.parcel_slots
        assert int(tables.capacity[row]) == slots, "a capacity is off"
        assert tables.parcels[row, : len(parcels)].tolist() == parcels, "the record of parcels is off"
        lanes = torch.arange(row * tables.groups, (row + 1) * tables.groups, device=tables.order.device)
        every = torch.arange(slots, device=lanes.device)
        places = tables.places(lanes, slots)
        order = tables.order[:, places].long()
        assert torch.equal(order.sort(2).values, every.expand_as(order)), "an order is off"
        known = tables.block_to_slot[:, lanes].long()
        blocks = tables.slot_to_block[:, places].long()
        layer, lane, slot = (blocks >= 0).nonzero(as_tuple=True)
        held = known[layer, lane, blocks[layer, lane, slot]]
        assert torch.equal(held, slot), "tables disagree"
        assert int((known >= 0).sum()) == slot.shape[0], "a block has a slot that holds another"

    def _move(self, number: int, moves: Moves) -> None:
        """The bytes of blocks that changed their slot, through a buffer of bounded size."""
        pool = self._stacked_pools[number]
        layers, slots, elements = pool.shape
        flat = pool.view(-1, elements)
        first = torch.arange(layers, device=flat.device).view(-1, 1, 1) * slots
        own = self._tables_of[number]
        moved_from, moved_to = (side.index_select(0, own) for side in (moves.source, moves.target))
        column_bytes = moved_from[..., 0].numel() * self.shape.block_bytes
        step = max(1, _MOVED_BYTES // column_bytes)
        for at in range(0, moved_from.shape[2], step):
            source = (moved_from[..., at : at + step] + first).flatten()
            target = (moved_to[..., at : at + step] + first).flatten()
            flat.index_copy_(0, target, flat.index_select(0, source))
