"""Planes: what a page keeps of every layer, in bytes, without saying what the bytes mean.

Knows nothing of where pages lie; layout.py places them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotset.v1 import kvstore_pb2 as pb

from services.contract.errors import InvalidRequest

PLANE_NAMES = ("kv", "index", "aux")
"""kv: the records. index: what the selector reads. aux: whatever else a row needs to go on."""

ENTRY_ALIGNMENT = 16
"""Device code reads 16 bytes a thread, so an entry is a multiple of that."""


@dataclass(frozen=True, slots=True)
class PlaneLayer:
    """One layer's part of a page: `[group][entry][entry_bytes]`; all zero where it keeps nothing."""

    groups: int
    entries: int  # a group; blocks in a page for kv
    entry_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in this layer."""
        return self.groups * self.entries * self.entry_bytes


@dataclass(frozen=True, slots=True)
class Plane:
    """A plane, layer by layer in the model's order."""

    name: str
    layers: tuple[PlaneLayer, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return sum(layer.page_bytes for layer in self.layers)


def check_planes(planes: Sequence[Plane]) -> None:
    """Refuse planes that no arena could hold.

    Raises:
        InvalidRequest: unknown or repeated names, no kv plane, layer counts that differ, entries that are
            not a multiple of 16 bytes.
    """
    names = [plane.name for plane in planes]
    if "kv" not in names or len(set(names)) != len(names) or not set(names) <= set(PLANE_NAMES):
        raise InvalidRequest(f"planes must be kv and at most one each of index and aux; got {names}")
    if len({len(plane.layers) for plane in planes}) != 1:
        raise InvalidRequest("every plane must describe the same number of layers")
    for plane in planes:
        for number, layer in enumerate(plane.layers):
            if min(layer.groups, layer.entries, layer.entry_bytes) < 0 or layer.entry_bytes % ENTRY_ALIGNMENT:
                raise InvalidRequest(
                    f"plane {plane.name}, layer {number}: {layer} - counts must not be negative and "
                    f"entry_bytes must be a multiple of {ENTRY_ALIGNMENT}"
                )
    if planes[names.index("kv")].page_bytes == 0:
        raise InvalidRequest("the kv plane keeps no bytes; at least one layer must have records")


def planes_to_wire(planes: Iterable[Plane]) -> list[pb.Plane]:
    """The planes as messages."""
    return [
        pb.Plane(
            name=plane.name,
            layers=[
                pb.PlaneLayer(groups=layer.groups, entries=layer.entries, entry_bytes=layer.entry_bytes)
                for layer in plane.layers
            ],
        )
        for plane in planes
    ]


def planes_from_wire(messages: Iterable[pb.Plane]) -> tuple[Plane, ...]:
    """The planes that messages describe, checked.

    Raises:
        InvalidRequest: as `check_planes`.
    """
    planes = tuple(
        Plane(
            message.name,
            tuple(PlaneLayer(layer.groups, layer.entries, layer.entry_bytes) for layer in message.layers),
        )
        for message in messages
    )
    check_planes(planes)
    return planes
