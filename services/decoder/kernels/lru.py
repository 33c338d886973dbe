"""Exact LRU over the hot slots of many lanes at once, as DESIGN section 4 defines it.

Knows tables only: no bytes, no arena. resolve.py adds the fetch.

One lane's slots stand in `order` from stale to recent. After a step they are, in this sequence:

    stale that stay | slots given to misses | hits | the open block's slot

and within each class the old sequence (for misses: the selection's). Never-used slots are the stalest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STALE, _MISS, _HIT, _OPEN, _ABSENT = range(5)  # sort keys of the sequence above


@dataclass(frozen=True, slots=True)
class LaneTables:
    """One layer's tables. Updated in place; a lane absent from a step is not touched.

    A pool is cut into parcels: `parcel_slots` slots for every group, those of a group side by side. A row
    owns parcels, so its lanes own equally many slots. Tables of slots are as long as the pool and not as all
    lanes at their widest: what belongs to a lane's i-th slot stands at that slot's place in the pool, and so
    does the i-th entry of the lane's order.
    """

    block_to_slot: Tensor  # [lanes, max_blocks] int32 lane slot, -1 = host only
    slot_to_block: Tensor  # [pool slots] int32 block, -1 = empty; means nothing where no row owns the parcel
    order: Tensor  # [pool slots] int32 lane slots from stale to recent, each lane's along its own places
    parcels: Tensor  # [rows, most parcels] int32; entries past a row's last parcel are never read
    capacity: Tensor  # [rows] int32 slots of each lane of the row
    groups: int
    parcel_slots: int  # a power of two

    def places(self, lanes: Tensor, width: int) -> Tensor:
        """[n, width] int64 pool slots of the first slots of `lanes` [n] int64; `width` is whole parcels.

        What lies past a lane's capacity means nothing.
        """
        owned = self.parcels[:, : width // self.parcel_slots].index_select(0, lanes // self.groups).long()
        base = owned.mul_(self.groups).add_((lanes % self.groups).unsqueeze(1)).mul_(self.parcel_slots)
        slot = torch.arange(self.parcel_slots, device=lanes.device)
        return (base.unsqueeze(2) + slot).flatten(1)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where the chosen blocks lie now, and which slots were given away for it."""

    slots: Tensor  # [n, top_k] int32 pool slots, -1 where the selection is -1
    open_slot: Tensor  # [n] int32 pool slots
    miss_lane: Tensor  # [misses] int64, index into the n lanes of the call
    miss_block: Tensor  # [misses] int64; the open block is never among them: append fills it
    miss_slot: Tensor  # [misses] int64 pool slots
    hits: int  # distinct chosen blocks that needed no fetch
    evictions: int  # blocks that lost their slot


def assign(tables: LaneTables, lanes: Tensor, selected: Tensor, open_block: Tensor) -> Assignment:
    """Give every chosen block and every open block a slot, evicting the stalest.

    Args:
        tables: one layer's; every lane named must own top_k + 1 slots, or one for every block of its row.
        lanes: [n] int64, distinct.
        selected: [n, top_k] int32 blocks, -1 = none; repeated blocks share one slot.
        open_block: [n] int64, the block that holds each row's newest token.

    A chosen open block without a slot counts as a hit: its bytes are about to be appended, not fetched. A
    lane with a slot for every block of its row can evict nothing; while it misses nothing either, its order
    rests.
    """
    chosen = selected.long()
    opened = open_block.unsqueeze(1)
    known = tables.block_to_slot.index_select(0, lanes)  # [n, max_blocks]
    held = known.gather(1, chosen.clamp_min(0)).masked_fill_(chosen < 0, -1)  # [n, top_k]
    open_held = known.gather(1, opened)  # [n, 1]
    missing = torch.cat([(chosen >= 0) & (held < 0), open_held < 0], dim=1)  # [n, top_k + 1]
    capacity = tables.capacity.index_select(0, lanes // tables.groups)  # [n]
    settled = (capacity > open_block) & ~missing.any(1)
    width = int(capacity.max())
    places = tables.places(lanes, width)  # [n, width]
    if bool(settled.all()):
        return _lookup(places, held, open_held)

    every = torch.arange(width, device=lanes.device)
    owned = every < capacity.unsqueeze(1)
    order = tables.order.index_select(0, places.flatten()).long().view_as(places)
    order.masked_fill_(~owned, -1)  # [n, width]
    key_of_slot = torch.zeros(lanes.shape[0], width + 1, dtype=torch.int8, device=lanes.device)
    key_of_slot.scatter_(1, held.long().masked_fill(held < 0, width), _HIT)
    hits = int(torch.count_nonzero(key_of_slot[:, :width]))
    key_of_slot.scatter_(1, open_held.long().masked_fill(open_held < 0, width), _OPEN)
    key_of_slot[:, width] = _ABSENT
    keys = key_of_slot.gather(1, order.masked_fill(order < 0, width))
    keys, sequence = keys.sort(dim=1, stable=True)
    order = order.gather(1, sequence)

    if not bool(missing.any()):
        _store_order(tables, places, order, owned, settled)
        found = _lookup(places, held, open_held)
        return Assignment(
            found.slots, found.open_slot, found.miss_lane, found.miss_block, found.miss_slot, hits, 0
        )

    blocks = torch.cat([chosen, opened], dim=1)
    missing = _first_of_each(blocks, missing, known.shape[1])
    rank = missing.cumsum(1) - 1
    n_th, column = missing.nonzero(as_tuple=True)
    block = blocks[n_th, column]
    place = rank[n_th, column]
    slot = order[n_th, place]  # the place-th of the stale ones
    lane = lanes[n_th]
    target = places[n_th, slot]
    evicted = tables.slot_to_block[target].long()
    occupied = evicted >= 0
    tables.block_to_slot[lane[occupied], evicted[occupied]] = -1
    tables.block_to_slot[lane, block] = slot.int()
    tables.slot_to_block[target] = block.int()

    is_open = block == open_block[n_th]
    keys.masked_fill_(every <= rank[:, -1:], _MISS)
    keys[n_th[is_open], place[is_open]] = _OPEN
    order = order.gather(1, keys.sort(dim=1, stable=True).indices)
    _store_order(tables, places, order, owned, settled)

    known = tables.block_to_slot.index_select(0, lanes)
    held = known.gather(1, chosen.clamp_min(0)).masked_fill_(chosen < 0, -1)
    found = _lookup(places, held, known.gather(1, opened))
    fetched = ~is_open
    n_fetch = n_th[fetched]
    return Assignment(
        slots=found.slots,
        open_slot=found.open_slot,
        miss_lane=n_fetch,
        miss_block=block[fetched],
        miss_slot=target[fetched],
        hits=hits + int((is_open & (column < chosen.shape[1])).sum()),
        evictions=int(occupied.sum()),
    )


def _lookup(places: Tensor, held: Tensor, open_held: Tensor) -> Assignment:
    """The answer when nothing is missing."""
    none = torch.empty(0, dtype=torch.int64, device=held.device)
    slots = places.gather(1, held.long().clamp_min(0)).int().masked_fill_(held < 0, -1)
    open_slot = places.gather(1, open_held.long()).squeeze(1).int()
    return Assignment(slots, open_slot, none, none, none, _distinct(held, places.shape[1]), 0)


def _distinct(held: Tensor, capacity: int) -> int:
    """How many different slots `held` names; -1 is none."""
    seen = torch.zeros(held.shape[0], capacity + 1, dtype=torch.bool, device=held.device)
    seen.scatter_(1, held.long().masked_fill(held < 0, capacity), True)
    return int(torch.count_nonzero(seen[:, :capacity]))


def _first_of_each(blocks: Tensor, wanted: Tensor, max_blocks: int) -> Tensor:
    """`wanted` without the repetitions of a block in its lane; the leftmost stays."""
    columns = torch.arange(blocks.shape[1], device=blocks.device).expand_as(blocks)
    nowhere = blocks.shape[1]
    safe = blocks.clamp_min(0)
    leftmost = torch.full((blocks.shape[0], max_blocks), nowhere, device=blocks.device)
    leftmost.scatter_reduce_(1, safe, columns.masked_fill(~wanted, nowhere), "amin")
    return wanted & (leftmost.gather(1, safe) == columns)


def _store_order(tables: LaneTables, places: Tensor, order: Tensor, owned: Tensor, settled: Tensor) -> None:
    """Write the orders of lanes that are not settled; past a lane's capacity its first entry stands again."""
    order = torch.where(owned, order, order[:, :1])
    places = torch.where(owned, places, places[:, :1])
    if bool(settled.any()):
        order, places = order[~settled], places[~settled]
    tables.order.index_copy_(0, places.flatten(), order.flatten().int())
