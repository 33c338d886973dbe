"""The hot buffer: a pool of hot slots a layer, and the tables that say whose each slot is.

Knows seats and sizes; the LRU and the copies are kernels. Every pool slot is free or owned by one lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from services.decoder.kernels.lanes import empty_tables, grow, leave, seat, shrink
from services.decoder.kernels.lru import LaneTables
from services.decoder.kv.shape import KvShape


class HotBuffer:
    """`capacities[layer]` slots a lane when all rows are seated at their configured size."""

    def __init__(
        self, shape: KvShape, rows: int, max_blocks: int, capacities: Sequence[int], device: torch.device
    ) -> None:
        lanes = rows * shape.groups
        self.shape = shape
        self.capacities = tuple(capacities)
        self.pools: list[Tensor] = []  # a layer: [pool slots, block elements]
        self.tables: list[LaneTables] = []
        self._free: list[list[int]] = []
        self._owned: list[dict[int, list[int]]] = []  # lane -> pool slots, so that leaving asks nothing back
        for capacity in capacities:
            slots = lanes * capacity
            self.pools.append(torch.zeros(slots, shape.block_elements, dtype=shape.dtype, device=device))
            self.tables.append(empty_tables(lanes, max_blocks, capacity, device))
            self._free.append(list(range(slots - 1, -1, -1)))
            self._owned.append({})

    def seat(self, row: int, opened: int) -> None:
        """Give every lane of `row` its configured capacity in every layer, block `opened` in its first slot.

        Raises:
            ValueError: the pool has no such room.
        """
        lanes = self._lanes(row)
        for layer, capacity in enumerate(self.capacities):
            count, free = capacity * len(lanes), self._free[layer]
            if count > len(free):
                raise ValueError(f"layer {layer} has {len(free)} free hot slots, {count} are needed")
            taken = free[-count:]
            del free[-count:]
            for place, lane in enumerate(lanes):
                self._owned[layer][lane] = taken[place * capacity : (place + 1) * capacity]
            slots = torch.tensor(taken, dtype=torch.int32).view(len(lanes), capacity)
            tables = self.tables[layer]
            seat(tables, slice(lanes.start, lanes.stop), slots.to(tables.order.device), opened)

    def leave(self, row: int) -> None:
        """Take every slot from `row`."""
        lanes = self._lanes(row)
        for layer, tables in enumerate(self.tables):
            leave(tables, slice(lanes.start, lanes.stop))
            for lane in lanes:
                self._free[layer].extend(self._owned[layer].pop(lane, []))

    def open_slots(self, layer: int, row: int) -> Tensor:
        """[groups] int64 pool slots of the open block of a row just seated."""
        lanes = self._lanes(row)
        return self.tables[layer].pool_slot[lanes.start : lanes.stop, 0].long()

    def resize(self, layer: int, lane: int, capacity: int) -> None:
        """Grow or shrink one lane.

        Raises:
            ValueError: the pool has no such room, or the table no such width.
        """
        tables, free = self.tables[layer], self._free[layer]
        owned = self._owned[layer].setdefault(lane, [])
        change = capacity - len(owned)
        if change > len(free):
            raise ValueError(f"layer {layer} has {len(free)} free hot slots, {change} are needed")
        if change > 0:
            grow(tables, lane, free[-change:])
            owned += free[-change:]
            del free[-change:]
        elif change < 0:
            dropped = shrink(tables, lane, -change)
            self._owned[layer][lane] = [slot for slot in owned if slot not in set(dropped)]
            free.extend(dropped)

    @property
    def slots_total(self) -> int:
        """Hot slots of all layers."""
        return sum(pool.shape[0] for pool in self.pools)

    @property
    def slots_used(self) -> int:
        """Of these, owned by lanes."""
        return self.slots_total - sum(map(len, self._free))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or owned once and tables agree with each other."""
        for tables, free, held, pool in zip(self.tables, self._free, self._owned, self.pools, strict=True):
            owned = tables.pool_slot[tables.pool_slot >= 0].tolist()
            assert sorted(owned) == sorted(chain.from_iterable(held.values())), "the record of slots is off"
            assert sorted(owned + free) == list(range(pool.shape[0])), "hot slots lost or owned twice"
            lane, slot = (tables.slot_to_block >= 0).nonzero(as_tuple=True)
            block = tables.slot_to_block[lane, slot].long()
            assert torch.equal(tables.block_to_slot[lane, block].long(), slot), "tables disagree"
            assert int((tables.block_to_slot >= 0).sum()) == lane.shape[0], (
                "a block has a slot that holds another"
            )
            assert torch.equal(tables.resident.long(), (tables.slot_to_block >= 0).sum(1)), "resident is off"
            width = tables.order.shape[1]
            slots = torch.arange(width, dtype=torch.int32, device=pool.device).expand_as(tables.order)
            owned_slots = slots.masked_fill(tables.pool_slot < 0, -1)
            assert torch.equal(tables.order.sort(1).values, owned_slots.sort(1).values), "an order is off"
            beyond = slots >= (tables.pool_slot >= 0).sum(1, keepdim=True)
            assert bool((tables.order[beyond] == -1).all()), "an order has a gap"

    def _lanes(self, row: int) -> range:
        return range(row * self.shape.groups, (row + 1) * self.shape.groups)
