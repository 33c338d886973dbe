"""How large the hot buffer's pools are, and how little and how much of them a row can own.

Knows settings and sizes; allocates nothing.
"""

from __future__ import annotations

from dataclasses import replace

from services.contract.byte_size import format_bytes
from services.contract.errors import SetupError
from services.decoder.kv.hot_class import HotClass, parcel_slots_for
from services.decoder.kv.shape import KvShape
from services.decoder.settings import DecoderSettings

_TABLE_BYTES = 8
"""Of a hot slot: its block, and its place in the order."""
MOST_LANE_SLOTS = 32_768
"""What resolve orders in a thread block's shared memory of an H200; a longer row is never resident whole."""
_DENSE_SHARE = 0.5
"""Of a limited buffer, for layers that attend to everything, where others want some too."""


def hot_classes(
    settings: DecoderSettings,
    shape: KvShape,
    sparse_layers: int,
    max_blocks: int,
    room_bytes: int | None,
    lane_slots: int = MOST_LANE_SLOTS,
) -> tuple[HotClass, ...]:
    """The classes of layers: those that attend to everything, then the sparse ones; either may be missing.

    Args:
        settings: what was asked.
        shape: of blocks.
        sparse_layers: layers that read what a selector chooses, the last ones.
        max_blocks: of the longest row.
        room_bytes: device memory for pools and their tables; None = no limit is known.
        lane_slots: hot slots that a sparse layer's lane may have, unless its floor is more.

    Raises:
        SetupError: not even one row fits, or more was asked for than there is.
    """
    budget = settings.hot_bytes or room_bytes
    classes = []
    if dense_layers := shape.layers - sparse_layers:
        limit = budget if budget is None or not sparse_layers else int(budget * _DENSE_SHARE)
        # A step reads every block of a row, so its floor is all that it may reach.
        dense = _class(shape, dense_layers, max_blocks, max_blocks, settings.max_rows * max_blocks, limit)
        classes.append(dense)
        if budget is not None:
            budget -= dense.parcels * parcel_bytes(shape, dense)
    if sparse_layers:
        floor = min(settings.floor_tokens // shape.block_tokens, max_blocks)
        most = max(floor, min(max_blocks, lane_slots))
        usual = min(settings.usual_tokens // shape.block_tokens, max_blocks)
        wanted = settings.max_rows * (usual if budget is None else most)
        classes.append(_class(shape, sparse_layers, floor, most, wanted, budget))
    taken = sum(each.parcels * parcel_bytes(shape, each) for each in classes)
    if room_bytes is not None and taken > room_bytes:
        raise SetupError(
            f"--hot-bytes {settings.hot_bytes}: the hot buffer would take {format_bytes(taken)}, and the "
            f"device has {format_bytes(max(0, room_bytes))} left for it; leave the flag out to take what is "
            "free, or raise --device-memory-share"
        )
    return tuple(classes)


def _class(
    shape: KvShape, layers: int, floor_blocks: int, most_blocks: int, wanted_blocks: int, limit: int | None
) -> HotClass:
    """A class whose lanes together hold `wanted_blocks`, or what fits into `limit` bytes."""
    size = parcel_slots_for(floor_blocks)
    floor, most = -(-floor_blocks // size), -(-most_blocks // size)
    followers = sum(not shape.chooses(layer) for layer in range(shape.layers - layers, shape.layers))
    made = HotClass(layers, max(floor, -(-wanted_blocks // size)), size, floor, most, followers)
    a_parcel = parcel_bytes(shape, made)
    parcels = made.parcels if limit is None else min(made.parcels, limit // a_parcel)
    if parcels < floor:
        raise SetupError(
            f"the hot buffer may take {format_bytes(max(0, limit or 0))} in {layers} layers, and one row "
            f"needs {format_bytes(floor * a_parcel)} there; raise --hot-bytes or --device-memory-share, "
            "or lower " + ("--max-model-len" if floor == most else "--budget-tokens and --hot-tokens")
        )
    return replace(made, parcels=parcels, most=min(most, parcels))


def parcel_bytes(shape: KvShape, of: HotClass) -> int:
    """Bytes of a parcel in all layers of its class, with its tables."""
    slots = shape.groups * of.parcel_slots
    return slots * (of.layers * shape.block_bytes + (of.layers - of.followers) * _TABLE_BYTES)
