"""What one step means for the tables: which rows get which position, and where its bytes go.

Built once a step and passed by hand to every layer. Knows positions and places, no tensors of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.shape import KvShape


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Rows that compute one token each. R rows, L = R * groups lanes, P pages of the longest row."""

    rows: Tensor  # [R] int64
    lanes: Tensor  # [L] int64 = row * groups + group
    open_block: Tensor  # [R] int64, the block of the new token
    lane_open_block: Tensor  # [L] int64
    lane_length: Tensor  # [L] int64 tokens, the new one included
    lane_offset: Tensor  # [L] int64, the new token's place in its block
    host_record: Tensor  # [L] int64, the new record's place in the arena = host block * block_tokens + offset
    fresh: Tensor | None  # [R] bool, rows whose block opens with this token; None = no row
    lane_fresh: Tensor | None  # [L] bool, likewise
    host_blocks: Tensor  # [L, P * blocks a page] int64, in the arena
    device_blocks: Tensor  # [L, P * blocks a page] int64, in the device-resident pools
    device_pages: Tensor  # [R, P] int64
    bounds_block: Tensor  # [R] int64 = device page * blocks a page + block in page, of the open block
    most_blocks: int  # blocks of the longest row

    @classmethod
    def build(
        cls, shape: KvShape, tables: RowTables, rows: Sequence[int], positions: Sequence[int]
    ) -> DecodeBatch:
        """Derive the batch.

        Args:
            shape: the model's sizes.
            tables: pages of every row, which must reach each position.
            rows: distinct rows.
            positions: position of each row's new token.
        """
        device = tables.host_pages.device
        row = torch.tensor(rows, dtype=torch.int64, device=device)
        position = torch.tensor(positions, dtype=torch.int64, device=device)
        most_blocks = max(positions) // shape.block_tokens + 1
        pages = -(-most_blocks // shape.blocks_per_page)
        host = tables.host_pages.index_select(0, row)[:, :pages]
        resident = tables.device_pages.index_select(0, row)[:, :pages].long()
        opened = position // shape.block_tokens
        offset = position % shape.block_tokens
        any_fresh = any(p % shape.block_tokens == 0 for p in positions)
        group = torch.arange(shape.groups, device=device)
        page_of_open = resident.gather(1, (opened // shape.blocks_per_page).unsqueeze(1)).squeeze(1)

        def by_lane(value: Tensor) -> Tensor:
            return value.repeat_interleave(shape.groups)

        lane_open = by_lane(opened)
        host_blocks = RowTables.blocks(host, shape.groups, shape.blocks_per_page).flatten(0, 1)
        open_home = host_blocks.gather(1, lane_open.unsqueeze(1)).squeeze(1)
        return cls(
            rows=row,
            lanes=(row.unsqueeze(1) * shape.groups + group).flatten(),
            open_block=opened,
            lane_open_block=lane_open,
            lane_length=by_lane(position + 1),
            lane_offset=by_lane(offset),
            host_record=open_home * shape.block_tokens + by_lane(offset),
            fresh=offset == 0 if any_fresh else None,
            lane_fresh=by_lane(offset == 0) if any_fresh else None,
            host_blocks=host_blocks,
            device_blocks=RowTables.blocks(resident, shape.groups, shape.blocks_per_page).flatten(0, 1),
            device_pages=resident,
            bounds_block=page_of_open * shape.blocks_per_page + opened % shape.blocks_per_page,
            most_blocks=most_blocks,
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
        host = RowTables.blocks(
            tables.host_pages[row : row + 1, :pages], shape.groups, shape.blocks_per_page
        )[0]
        resident_pages = tables.device_pages[row : row + 1, :pages]
        resident = RowTables.blocks(resident_pages, shape.groups, shape.blocks_per_page)[0]
        position = torch.arange(start, end, device=device)
        block, offset = position // shape.block_tokens, position % shape.block_tokens

        def records(place: Tensor) -> Tensor:
            return (place[:, block] * shape.block_tokens + offset).t().flatten()

        bounds = RowTables.blocks(resident_pages, 1, shape.blocks_per_page)[0, 0]
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
