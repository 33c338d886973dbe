"""What one step means for the tables: which rows get which position, and where its bytes go.

Built once a step and passed by hand to every layer. Knows positions and places, no tensors of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.kernels.decode_batch import DecodeBatch
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
    """A run of one row's prompt: tokens `start` to `end` - 1, starting at a block's edge.

    What it holds grows with the chunk; of what came before it has views of the tables only.
    """

    row: int
    start: int
    end: int
    arena_pages: Tensor  # [pages up to the end] int32 in host memory, where they lie in the arena
    host_pages: Tensor  # the same on the device
    device_pages: Tensor  # [pages up to the end] int32
    index_blocks: Tensor  # [blocks the chunk touches] int64

    @classmethod
    def build(cls, shape: KvShape, tables: RowTables, row: int, start: int, end: int) -> PrefillChunk:
        """Derive the chunk.

        Raises:
            ValueError: it starts inside a block, whose bounds would then be made from a part of its keys.
        """
        if start % shape.block_tokens:
            raise ValueError(f"a prefill chunk starts at token {start}, inside a block")
        device = tables.host_pages.device
        pages = shape.pages_for(end)
        resident = tables.device_pages[row, :pages]
        block = torch.arange(start // shape.block_tokens, -(-end // shape.block_tokens), device=device)
        page = resident.index_select(0, block // shape.blocks_per_page).long()
        return cls(
            row=row,
            start=start,
            end=end,
            arena_pages=tables.arena_pages(row, pages),
            host_pages=tables.host_pages[row, :pages],
            device_pages=resident,
            index_blocks=page * shape.blocks_per_page + block % shape.blocks_per_page,
        )
