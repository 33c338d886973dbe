"""Rows of one class of layers that are given parcels, scattered over the pool, and lose them again."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from services.decoder.kernels.lanes import Changes, Moves, empty_tables, grow, leave, seat, shrink
from services.decoder.kernels.lru import LaneTables


class Parcels:
    """The tables of some layers, and which parcels are whose."""

    def __init__(
        self,
        rows: int,
        groups: int,
        max_blocks: int,
        most: int,
        parcel_slots: int,
        *,
        layers: int = 1,
        total: int = 0,
        seed: int = 0,
        device: torch.device,
    ) -> None:
        """As many parcels as all rows can own, or `total`."""
        self.total = total or rows * most
        self.tables = empty_tables(layers, rows, groups, max_blocks, self.total, parcel_slots, most, device)
        self.held: dict[int, list[int]] = {}
        self.free = list(range(self.total))
        random.Random(seed).shuffle(self.free)

    def seat(self, row: int, count: int, opened: int) -> None:
        self.held[row] = []
        self._give(row, count)
        seat(self.tables, row, count * self.tables.parcel_slots, opened)

    def leave(self, row: int) -> None:
        leave(self.tables, row)
        self.free += self.held.pop(row)

    def grow(self, row: int, count: int) -> None:
        before = self.slots(row)
        self._give(row, count)
        grow(self.tables, Changes.of([(row, before, self.slots(row))], self.tables.order.device))

    def shrink(self, row: int, count: int) -> Moves:
        before, held = self.slots(row), self.held[row]
        after = before - count * self.tables.parcel_slots
        moves = shrink(self.tables, Changes.of([(row, before, after)], self.tables.order.device))
        self.free += held[len(held) - count :]
        del held[len(held) - count :]
        return moves

    def slots(self, row: int) -> int:
        return len(self.held[row]) * self.tables.parcel_slots

    def _give(self, row: int, count: int) -> None:
        held = self.held[row]
        new = [self.free.pop() for _ in range(count)]
        self.tables.parcels[row, len(held) : len(held) + count] = torch.tensor(new, dtype=torch.int32)
        held += new


def follow(pool: Tensor, moves: Moves) -> None:
    """Move the bytes of a pool of one layer."""
    pool[moves.target.flatten()] = pool[moves.source.flatten()]


def order_of(tables: LaneTables, lane: int) -> list[int]:
    """A lane's slots from stale to recent, in tables of one layer."""
    return tables.order[places_of(tables, lane)].tolist()


def places_of(tables: LaneTables, lane: int) -> Tensor:
    """[capacity] int64 pool slots of a lane, in tables of one layer."""
    capacity = int(tables.capacity[lane // tables.groups])
    lanes = torch.tensor([lane], device=tables.order.device)
    return tables.places(lanes, capacity)[0]
