"""A decode step's records into a pool's open blocks and into the arena.

Knows both sides' block layout, which is the same; not which residence the pool belongs to.
"""

from __future__ import annotations

from torch import Tensor

from services.decoder.kernels.append import append
from services.decoder.kv.batch import DecodeBatch
from services.decoder.kv.shape import KvShape


def write_through(
    shape: KvShape, batch: DecodeBatch, open_slot: Tensor, records: Tensor, pool: Tensor, arena: Tensor
) -> None:
    """Append one record a lane on both sides.

    Args:
        shape: the model's sizes.
        batch: this step's rows.
        open_slot: [L] int32 block of `pool` that takes the record.
        records: [L, record elements].
        pool: [pool blocks, block elements].
        arena: [host blocks, block elements].
    """
    opened = open_slot.long()
    if batch.lane_fresh is not None:
        # Whatever the slot held was another block's; attention must not multiply it, not even by zero.
        pool[opened[batch.lane_fresh]] = 0
    append(
        records,
        pool.view(-1, shape.record_elements),
        opened * shape.block_tokens + batch.lane_offset,
        arena.view(-1, shape.record_elements),
        batch.host_record,
    )
