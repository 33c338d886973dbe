"""A class of layers and the pool of hot slots that rows share in each of them, in numbers.

Knows sizes only; no torch. A pool is cut into parcels of `parcel_slots` slots a lane. A row owns the same
parcels in every layer of the class and in every group, so the host counts them once for all lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_MOST_PARCEL_SLOTS = 16
_PARCELS_OF_A_FLOOR = 16  # at least, where blocks allow it: a parcel is the step in which capacities change


@dataclass(frozen=True, slots=True)
class HotClass:
    """Layers that follow one another, and what a pool of theirs holds."""

    layers: int
    parcels: int  # in each layer's pool
    parcel_slots: int  # blocks of a lane in a parcel, a power of two
    floor: int  # parcels that every row can count on, if its blocks fill them
    most: int  # parcels that one row can own
    followers: int = 0  # of the layers, those that use the tables of one before them

    @property
    def lane_slots(self) -> int:
        """Slots of a lane that owns as many as it can."""
        return self.most * self.parcel_slots

    def pool_slots(self, groups: int) -> int:
        """Slots of one layer's pool."""
        return self.parcels * self.parcel_slots * groups


def parcel_slots_for(floor_blocks: int) -> int:
    """The size of a parcel: small beside a row's floor."""
    wanted = min(_MOST_PARCEL_SLOTS, max(1, floor_blocks // _PARCELS_OF_A_FLOOR))
    return 1 << (wanted.bit_length() - 1)


class Resize(NamedTuple):
    """What a row owns from now on in the layers of one class."""

    number: int  # of the class
    row: int
    parcels: list[int]  # the first ones of those that it had, or all of them and more
