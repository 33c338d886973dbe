"""Which rows decode in a step, and where the bytes of their new tokens go.

Built once a step (once for good where a graph is captured) and handed to every operation of every layer.
GPU kernels read the fields; what follows from them is worked out for the twins, once, when first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.places import blocks_of


@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """Rows that compute one token each: R rows, L = R * groups lanes, P pages of the longest row.

    Row i of the batch sits in row seats[i] of the tables. Padding rows follow the real ones; the twins
    know none.
    """

    seats: Tensor  # [R] int32
    length: Tensor  # [R] int32 tokens, the new one included
    real_rows: Tensor  # [1] int32
    host_pages: Tensor  # [table rows, max_pages] int32
    device_pages: Tensor  # [table rows, max_pages] int32
    groups: int
    block_tokens: int
    blocks_per_page: int
    most_blocks: int  # blocks of the longest row, or more

    @cached_property
    def position(self) -> Tensor:
        """[R] int64, of the new token."""
        return self.length.long() - 1

    @cached_property
    def lanes(self) -> Tensor:
        """[L] int64 lanes of the tables: seat * groups + group."""
        group = torch.arange(self.groups, device=self.seats.device)
        return (self.seats.long().unsqueeze(1) * self.groups + group).flatten()

    @cached_property
    def open_block(self) -> Tensor:
        """[R] int64, the block of the new token."""
        return self.position // self.block_tokens

    @cached_property
    def lane_open_block(self) -> Tensor:
        """[L] int64."""
        return self._by_lane(self.open_block)

    @cached_property
    def lane_blocks(self) -> Tensor:
        """[L] int32, how many blocks there are, for a kernel."""
        return (self.lane_open_block + 1).int()

    @cached_property
    def lane_length(self) -> Tensor:
        """[L] int64 tokens, the new one included."""
        return self._by_lane(self.length.long())

    @cached_property
    def lane_offset(self) -> Tensor:
        """[L] int64, the new token's place in its block."""
        return self._by_lane(self.position % self.block_tokens)

    @cached_property
    def fresh(self) -> Tensor | None:
        """[R] bool, rows whose block opens with this token; None = no row."""
        fresh = self.position % self.block_tokens == 0
        return fresh if bool(fresh.any()) else None

    @cached_property
    def lane_fresh(self) -> Tensor | None:
        """[L] bool, likewise."""
        return None if self.fresh is None else self._by_lane(self.fresh)

    @cached_property
    def filled(self) -> Tensor | None:
        """[R] bool, rows whose block is full with this token; None = no row."""
        filled = self.length % self.block_tokens == 0
        return filled if bool(filled.any()) else None

    @cached_property
    def row_device_pages(self) -> Tensor:
        """[R, P] int64."""
        return self._pages(self.device_pages).long()

    @cached_property
    def host_blocks(self) -> Tensor:
        """[L, P * blocks a page] int64, where each block lies in the arena."""
        return blocks_of(self._pages(self.host_pages), self.groups, self.blocks_per_page).flatten(0, 1)

    @cached_property
    def device_blocks(self) -> Tensor:
        """[L, P * blocks a page] int64, where each block lies in the device-resident pools."""
        return blocks_of(self.row_device_pages, self.groups, self.blocks_per_page).flatten(0, 1)

    @cached_property
    def host_record(self) -> Tensor:
        """[L] int64, the new record's place in the arena = host block * block_tokens + offset."""
        home = self.host_blocks.gather(1, self.lane_open_block.unsqueeze(1)).squeeze(1)
        return home * self.block_tokens + self.lane_offset

    @cached_property
    def index_block(self) -> Tensor:
        """[R] int64 = device page * blocks a page + block in page, of the open block."""
        return self._entry_of(self.row_device_pages)

    @cached_property
    def host_index_block(self) -> Tensor:
        """[R] int64 = host page * blocks a page + block in page, of the open block."""
        return self._entry_of(self._pages(self.host_pages).long())

    def _entry_of(self, pages: Tensor) -> Tensor:
        page = pages.gather(1, (self.open_block // self.blocks_per_page).unsqueeze(1)).squeeze(1)
        return page * self.blocks_per_page + self.open_block % self.blocks_per_page

    def _pages(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.seats)[:, : -(-self.most_blocks // self.blocks_per_page)]

    def _by_lane(self, value: Tensor) -> Tensor:
        return value.repeat_interleave(self.groups)
