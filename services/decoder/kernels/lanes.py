"""Seating, resizing and clearing lanes of one layer's tables, between steps.

Knows tables only; which pool slots are free is kv/hot_buffer.py's affair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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


def clear(tables: LaneTables, lane: int) -> list[int]:
    """Take every slot from the lane, by walking its slots; returns the pool slots that came free."""
    return shrink(tables, lane, capacity_of(tables, lane))
