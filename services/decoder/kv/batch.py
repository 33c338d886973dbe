"""What one step means for the tables: which rows get which position, and where its bytes go.

Built once a step and passed by hand to every layer. Knows positions and places, no tensors of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.places import blocks_of
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.shape import KvShape


def decode_batch(
    shape: KvShape, tables: RowTables, rows: Sequence[int], positions: Sequence[int]
) -> DecodeBatch:
    """Rows that decode in a step.

    Args:
        shape: the model's sizes.
        tables: pages of every row, which must reach each position.
        rows: distinct rows.
        positions: position of each row's new token.
    """
    device = tables.host_pages.device
    return DecodeBatch(
        seats=torch.tensor(rows, dtype=torch.int32, device=device),
        length=torch.tensor(positions, dtype=torch.int32, device=device) + 1,
        real_rows=torch.tensor([len(rows)], dtype=torch.int32, device=device),
        host_pages=tables.host_pages,
        device_pages=tables.device_pages,
        groups=shape.groups,
        block_tokens=shape.block_tokens,
        blocks_per_page=shape.blocks_per_page,
        most_blocks=max(positions) // shape.block_tokens + 1,
    )


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of one row's prompt: tokens `start` to `end` - 1, starting at a block's edge."""

    row: int
    start: int
    end: int
    host_blocks: Tensor  # [groups, blocks] int64, of every block up to the end
    device_blocks: Tensor  # [groups, blocks] int64
    bounds_blocks: Tensor  # [blocks the chunk touches] int64
    host_records: Tensor  # [tokens * groups] int64, where each record goes, token-major
    device_records: Tensor  # [tokens * groups] int64

    @classmethod
    def build(cls, shape: KvShape, tables: RowTables, row: int, start: int, end: int) -> PrefillChunk:
        """Derive the chunk.

        Raises:
            ValueError: it starts inside a block, whose bounds would then be made from a part of its keys.
        """
        if start % shape.block_tokens:
            raise ValueError(f"a prefill chunk starts at token {start}, inside a block")
        device = tables.host_pages.device
        blocks = -(-end // shape.block_tokens)
        pages = shape.pages_for(end)
        host = blocks_of(tables.host_pages[row : row + 1, :pages], shape.groups, shape.blocks_per_page)[0]
        resident_pages = tables.device_pages[row : row + 1, :pages]
        resident = blocks_of(resident_pages, shape.groups, shape.blocks_per_page)[0]
        position = torch.arange(start, end, device=device)
        block, offset = position // shape.block_tokens, position % shape.block_tokens

        def records(place: Tensor) -> Tensor:
            return (place[:, block] * shape.block_tokens + offset).t().flatten()

        bounds = blocks_of(resident_pages, 1, shape.blocks_per_page)[0, 0]
        return cls(
            row=row,
            start=start,
            end=end,
            host_blocks=host[:, :blocks],
            device_blocks=resident[:, :blocks],
            bounds_blocks=bounds[start // shape.block_tokens : blocks],
            host_records=records(host),
            device_records=records(resident),
        )
