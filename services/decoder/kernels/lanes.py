"""Seating, resizing and clearing the lanes of rows, in all layers at once, between steps.

Knows tables only; which parcels are free is engine/capacity_book.py's affair. Here the tables of layers lie
one behind the other: `block_to_slot`, `slot_to_block` and `order` have a leading dimension of layers.
Nothing reads from the device, so a GPU is never waited for: how much a row owns is told by the host.
(Assigning a number to an element would wait too; filling it does not.)

A lane's slots are always 0 ... capacity - 1. A row that shrinks gives its last parcels up, and with them
whatever slots they have; so that the stalest blocks are lost and not those which happen to lie there, the
others move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.decoder.kernels.lru import LaneTables
from services.decoder.kernels.upload import upload


@dataclass(frozen=True, slots=True)
class Moves:
    """Blocks that change their slot: `source` -> `target`; where they are equal, nothing moves."""

    source: Tensor  # [layers, lanes, most] int64 pool slots
    target: Tensor  # [layers, lanes, most] int64 pool slots, none of them the source of another block


@dataclass(frozen=True, slots=True)
class Changes:
    """Rows that are seated, all of them growing or all shrinking."""

    rows: Tensor  # [rows] int64, distinct
    before: Tensor  # [rows] int64 slots that their lanes own
    after: Tensor  # [rows] int64 slots that they shall own, at least one
    widest: int  # the most slots of a lane, before or after
    most_lost: int  # of a lane, where they shrink

    @classmethod
    def of(cls, changes: Sequence[tuple[int, int, int]], device: torch.device) -> Changes:
        """From the host's numbers: (row, slots before, slots after)."""
        rows, before, after = upload([list(column) for column in zip(*changes, strict=True)], device)
        widest = max(max(old, new) for _, old, new in changes)
        return cls(rows, before, after, widest, max(old - new for _, old, new in changes))

    def lanes(self, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """The lanes [lanes] int64, and what they own before and after, [lanes, 1] each."""
        lanes = (self.rows.unsqueeze(1) * groups + torch.arange(groups, device=self.rows.device)).flatten()
        before, after = (each.repeat_interleave(groups).unsqueeze(1) for each in (self.before, self.after))
        return lanes, before, after


def empty_tables(
    layers: int,
    rows: int,
    groups: int,
    max_blocks: int,
    parcels: int,
    parcel_slots: int,
    most: int,
    device: torch.device,
) -> LaneTables:
    """Tables in which no row owns a parcel; a row may own up to `most` of the `parcels`."""

    def full(*shape: int, value: int = -1) -> Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    slots = parcels * groups * parcel_slots
    return LaneTables(
        block_to_slot=full(layers, rows * groups, max_blocks),
        slot_to_block=full(layers, slots),
        order=full(layers, slots),
        parcels=full(rows, most, value=0),
        capacity=full(rows, value=0),
        groups=groups,
        parcel_slots=parcel_slots,
    )


def layer_of(tables: LaneTables, layer: int) -> LaneTables:
    """One layer's, sharing their memory."""
    return replace(
        tables,
        block_to_slot=tables.block_to_slot[layer],
        slot_to_block=tables.slot_to_block[layer],
        order=tables.order[layer],
    )


def seat(tables: LaneTables, row: int, slots: int, opened: int) -> None:
    """Let a row begin with `slots` slots a lane, whose parcels it has been given.

    The open block takes the first slot, all others are empty.

    Args:
        tables: of all layers.
        row: of which the tables know no block.
        slots: a lane's.
        opened: the row's open block.
    """
    places = _places(tables, row, slots)
    order = torch.arange(slots, dtype=torch.int32, device=places.device).roll(-1)
    tables.order[:, places] = order  # stale to recent: the empty ones, then the open block's
    tables.slot_to_block.index_fill_(1, places.flatten(), -1)
    tables.slot_to_block.index_fill_(1, places[:, 0], opened)
    tables.block_to_slot[:, _lanes(tables, row), opened].zero_()
    tables.capacity[row].fill_(slots)


def leave(tables: LaneTables, row: int) -> None:
    """Take every slot from a row."""
    tables.block_to_slot[:, _lanes(tables, row)].fill_(-1)
    tables.capacity[row].zero_()


def grow(tables: LaneTables, changes: Changes) -> None:
    """Add slots at the stale end, where they are used first; the rows have been given their parcels."""
    lanes, before, after = changes.lanes(tables.groups)
    slot = torch.arange(changes.widest, device=lanes.device)
    places = tables.places(lanes, changes.widest)  # [lanes, widest]
    old = tables.order[:, places]
    shift = after - before
    stays = old.gather(2, (slot - shift).clamp_min_(0).expand_as(old))
    order = torch.where(slot < shift, (before + slot).int(), stays)
    _store(tables.order, places, order, slot < after)
    blocks = tables.slot_to_block[:, places].masked_fill_(slot >= before, -1)
    _store(tables.slot_to_block, places, blocks, slot < after)
    tables.capacity.index_copy_(0, changes.rows, changes.after.int())


def shrink(tables: LaneTables, changes: Changes) -> Moves:
    """Drop the stalest slots and rename the rest; the bytes must follow before the parcels are given away.

    Every row still has the parcels that it is losing.
    """
    lanes, before, after = changes.lanes(tables.groups)
    slot = torch.arange(changes.widest, device=lanes.device)
    places = tables.places(lanes, changes.widest)  # [lanes, widest]
    order = tables.order[:, places].long().masked_fill_(slot >= before, 0)  # [layers, lanes, widest]
    lost = before - after  # [lanes, 1]
    nowhere = changes.widest
    dropped = torch.zeros(*order.shape[:2], nowhere + 1, dtype=torch.bool, device=lanes.device)
    dropped = dropped.scatter_(2, order.masked_fill(slot >= lost, nowhere), True)[..., :nowhere]
    # The survivors beyond the end, and the holes before it: equally many, and of each those come first.
    beyond = (slot >= after) & (slot < before)
    movers = _first(beyond & ~dropped, changes.most_lost)
    holes = _first(dropped & (slot < after), changes.most_lost)
    moving = (beyond & ~dropped).sum(2, keepdim=True)
    moves = torch.arange(changes.most_lost, device=lanes.device) < moving  # [layers, lanes, most lost]

    name = slot.masked_fill(dropped, -1)
    name.scatter_(2, movers, torch.where(moves, holes, name.gather(2, movers)))
    blocks = tables.slot_to_block[:, places]
    recent = order.gather(
        2, (before - 1).expand(*order.shape[:2], 1)
    )  # the open block's slot: it has a block
    known = torch.where((blocks >= 0) & (slot < before), slot, recent)
    layer = torch.arange(order.shape[0], device=lanes.device).view(-1, 1, 1)
    tables.block_to_slot[layer, lanes.unsqueeze(1), blocks.gather(2, known).long()] = name.gather(
        2, known
    ).int()

    stays = name.gather(2, order.gather(2, (slot + lost).clamp_max_(nowhere - 1).expand_as(order)))
    _store(tables.order, places, stays.int(), slot < after)
    blocks.masked_fill_(dropped, -1)
    blocks.scatter_(2, holes, torch.where(moves, blocks.gather(2, movers), blocks.gather(2, holes)))
    _store(tables.slot_to_block, places, blocks, slot < after)
    tables.capacity.index_copy_(0, changes.rows, changes.after.int())
    everywhere = places.expand(order.shape)
    rests = everywhere.gather(2, recent)  # where nothing moves to
    source = torch.where(moves, everywhere.gather(2, movers), rests)
    return Moves(source, torch.where(moves, everywhere.gather(2, holes), rests))


def _first(wanted: Tensor, count: int) -> Tensor:
    """[layers, lanes, count] int64: the slots that are wanted, in their sequence, and then some others."""
    return (~wanted).byte().sort(dim=2, stable=True).indices[..., :count]


def _store(table: Tensor, places: Tensor, values: Tensor, owned: Tensor) -> None:
    """Write `values` at `places` where a lane owns them; elsewhere its first one once more."""
    values = torch.where(owned, values, values[..., :1])
    table[:, torch.where(owned, places, places[:, :1])] = values


def _lanes(tables: LaneTables, row: int) -> slice:
    return slice(row * tables.groups, (row + 1) * tables.groups)


def _places(tables: LaneTables, row: int, slots: int) -> Tensor:
    """[groups, slots] int64 pool slots of a row's lanes."""
    lanes = torch.arange(row * tables.groups, (row + 1) * tables.groups, device=tables.parcels.device)
    return tables.places(lanes, slots)
