"""Seating, resizing and clearing the lanes of a row, in all layers at once, between steps.

Knows tables only; which parcels are free is engine/capacity_book.py's affair. Here the tables of layers lie
one behind the other: `block_to_slot`, `slot_to_block` and `order` have a leading dimension of layers.
Nothing reads from the device, so a GPU is never waited for: how much a row owns is told by the host.
(Assigning a number to an element would wait too; filling it does not.)

A lane's slots are always 0 ... capacity - 1. A row that shrinks gives its last parcels up, and with them
whatever slots they have; so that the stalest blocks are lost and not those which happen to lie there, the
others move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.decoder.kernels.lru import LaneTables


@dataclass(frozen=True, slots=True)
class Moves:
    """Blocks that change their slot: `source` -> `target`; where they are equal, nothing moves."""

    source: Tensor  # [layers, lanes of a row, most] int64 pool slots
    target: Tensor  # [layers, lanes of a row, most] int64 pool slots, all distinct in a layer


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


def grow(tables: LaneTables, row: int, before: int, after: int) -> None:
    """Add slots at the stale end, where they are the first to be used; the row has been given their parcels.

    Args:
        tables: of all layers.
        row: that is seated.
        before: slots that its lanes own.
        after: slots that they shall own.
    """
    places = _places(tables, row, after)
    new = torch.arange(before, after, dtype=torch.int32, device=places.device)
    old = tables.order[:, places[:, :before]]
    tables.order[:, places] = torch.cat([new.expand(*old.shape[:2], -1), old], 2)
    tables.slot_to_block.index_fill_(1, places[:, before:].flatten(), -1)
    tables.capacity[row].fill_(after)


def shrink(tables: LaneTables, row: int, before: int, after: int) -> Moves:
    """Drop the stalest slots and rename the rest; the bytes must follow before the parcels are given away.

    Args:
        tables: of all layers.
        row: that is seated, and still has the parcels it is losing.
        before: slots that its lanes own.
        after: slots that they shall own, at least one.
    """
    lanes, lost = _lanes(tables, row), before - after
    places = _places(tables, row, before)  # [groups, before]
    order = tables.order[:, places].long()  # [layers, groups, before]
    dropped = torch.zeros_like(order, dtype=torch.bool).scatter_(2, order[..., :lost], True)
    # The survivors beyond the end, and the holes before it: equally many, of each the first `moving` columns.
    columns = min(lost, after)
    movers = dropped[..., after:].byte().sort(dim=2, stable=True).indices[..., :columns] + after
    holes = (~dropped[..., :after]).byte().sort(dim=2, stable=True).indices[..., :columns]
    moving = (~dropped[..., after:]).sum(2, keepdim=True)
    moves = torch.arange(columns, device=places.device) < moving  # [layers, groups, columns]

    name = torch.arange(before, device=places.device).masked_fill(dropped, -1)
    name.scatter_(2, movers, torch.where(moves, holes, -1))
    known = tables.block_to_slot[:, lanes].long()
    renamed = name.gather(2, known.clamp_min(0)).masked_fill_(known < 0, -1)
    tables.block_to_slot[:, lanes].copy_(renamed)
    tables.order[:, places[:, :after]] = name.gather(2, order[..., lost:]).int()

    blocks = tables.slot_to_block[:, places]
    blocks.masked_fill_(dropped, -1)
    blocks.scatter_(2, holes, torch.where(moves, blocks.gather(2, movers), blocks.gather(2, holes)))
    tables.slot_to_block[:, places[:, :after]] = blocks[..., :after]
    tables.capacity[row].fill_(after)
    everywhere = places.expand(order.shape)
    target = everywhere.gather(2, holes)
    return Moves(torch.where(moves, everywhere.gather(2, movers), target), target)


def _lanes(tables: LaneTables, row: int) -> slice:
    return slice(row * tables.groups, (row + 1) * tables.groups)


def _places(tables: LaneTables, row: int, slots: int) -> Tensor:
    """[groups, slots] int64 pool slots of a row's lanes."""
    lanes = torch.arange(row * tables.groups, (row + 1) * tables.groups, device=tables.parcels.device)
    return tables.places(lanes, slots)
