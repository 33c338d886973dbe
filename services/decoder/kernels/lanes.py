"""Seating, resizing and clearing lanes of one layer's tables, between steps.

Knows tables only; which pool slots are free is kv/hot_buffer.py's affair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.decoder.kernels.lru import LaneTables


def empty_tables(lanes: int, max_blocks: int, max_capacity: int, device: torch.device) -> LaneTables:
    """Tables in which no lane owns a slot."""

    def full(*shape: int, value: int = -1) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    return LaneTables(
        block_to_slot=full(lanes, max_blocks),
        slot_to_block=full(lanes, max_capacity),
        order=full(lanes, max_capacity),
        resident=full(lanes, value=0),
        pool_slot=full(lanes, max_capacity),
    )


def capacity_of(tables: LaneTables, lane: int) -> int:
    """Slots that the lane owns."""
    return int((tables.order[lane] >= 0).sum())


def seat(tables: LaneTables, lanes: slice, pool_slots: Tensor, opened: int) -> None:
    """Give lanes that own nothing their slots; the open block takes the first, all others are empty.

    Args:
        tables: one layer's.
        lanes: of one row.
        pool_slots: [lanes, capacity] int32.
        opened: the row's open block.
    """
    capacity = pool_slots.shape[1]
    tables.pool_slot[lanes, :capacity] = pool_slots
    # Stale to recent: the empty ones, then the open block's.
    order = torch.arange(1, capacity + 1, dtype=torch.int32, device=pool_slots.device)
    order[-1] = 0
    tables.order[lanes, :capacity] = order
    tables.slot_to_block[lanes, 0] = opened
    tables.block_to_slot[lanes, opened] = 0
    tables.resident[lanes] = 1


def leave(tables: LaneTables, lanes: slice) -> None:
    """Take every slot from lanes, by walking their slots."""
    blocks = tables.slot_to_block[lanes].long().clamp_min_(0)  # no block 0 remains either
    tables.block_to_slot[lanes].scatter_(1, blocks, -1)
    for table in (tables.slot_to_block, tables.pool_slot, tables.order):
        table[lanes] = -1
    tables.resident[lanes] = 0


def grow(tables: LaneTables, lane: int, pool_slots: Sequence[int]) -> None:
    """Add slots at the stale end, where they are the first to be used.

    Raises:
        ValueError: more than the table's width.
    """
    owned = capacity_of(tables, lane)
    width = tables.order.shape[1]
    if owned + len(pool_slots) > width:
        raise ValueError(f"lane {lane}: {owned} slots + {len(pool_slots)} exceed the table's {width}")
    unowned = (tables.pool_slot[lane] < 0).nonzero().squeeze(1)[: len(pool_slots)]
    tables.pool_slot[lane, unowned] = torch.tensor(pool_slots, dtype=torch.int32, device=unowned.device)
    tables.order[lane, : owned + len(pool_slots)] = torch.cat([unowned.int(), tables.order[lane, :owned]])


def shrink(tables: LaneTables, lane: int, count: int) -> list[int]:
    """Drop the `count` stalest slots and forget their blocks; returns the pool slots that came free.

    Raises:
        ValueError: the lane owns fewer.
    """
    owned = capacity_of(tables, lane)
    if count > owned:
        raise ValueError(f"lane {lane} owns {owned} slots and cannot give up {count}")
    dropped = tables.order[lane, :count].long()
    blocks = tables.slot_to_block[lane, dropped].long()
    held = blocks[blocks >= 0]
    tables.block_to_slot[lane, held] = -1
    tables.resident[lane] -= held.shape[0]
    freed: list[int] = tables.pool_slot[lane, dropped].tolist()
    tables.slot_to_block[lane, dropped] = -1
    tables.pool_slot[lane, dropped] = -1
    tables.order[lane, : owned - count] = tables.order[lane, count:owned].clone()
    tables.order[lane, owned - count : owned] = -1
    return freed
