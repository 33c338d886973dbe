"""`kv_mode=tiered`: the arena holds every row's whole history, the hot buffer what attention reads.

Knows how the two are kept in step; which blocks are read is the selector's choice.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch
from torch import Tensor

from services.decoder.kernels.lru import assign
from services.decoder.kernels.resolve import Counter, ResolveParams, resolve
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.batch import DecodeBatch, PrefillChunk
from services.decoder.kv.history import gather_history
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.residence import Placement, SlotCount
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.write_through import write_through


class Tiered:
    """The Residence of DESIGN section 3."""

    def __init__(self, arena: ArenaMap, hot: HotBuffer, tables: RowTables) -> None:
        shape = hot.shape
        self.hot = hot
        self._shape = shape
        self._tables = tables
        self._seated: set[int] = set()
        self._arena = [arena.kv_blocks(layer) for layer in range(shape.layers)]
        self.counters = torch.zeros(shape.layers, len(Counter), dtype=torch.int64)
        self._params = [
            ResolveParams(hot.tables[layer], hot.pools[layer], self._arena[layer], self.counters[layer])
            for layer in range(shape.layers)
        ]

    def seat(self, row: int, tokens: int) -> None:
        """Give `row` its hot slots and load the filled part of its open block."""
        shape = self._shape
        self.hot.seat(row)
        self._seated.add(row)
        opened = (tokens - 1) // shape.block_tokens
        filled = tokens - opened * shape.block_tokens
        lanes = torch.arange(row * shape.groups, (row + 1) * shape.groups)
        nothing = torch.full((shape.groups, 1), -1, dtype=torch.int32)
        pages = self._tables.host_pages[row : row + 1, : shape.pages_for(tokens)]
        home = RowTables.blocks(pages, shape.groups, shape.blocks_per_page)[0, :, opened]
        for params in self._params:
            slot = assign(params.tables, lanes, nothing, torch.full((shape.groups,), opened)).open_slot.long()
            block = params.arena.index_select(0, home).view(shape.groups, shape.block_tokens, -1)
            block[:, filled:] = 0  # whatever an earlier owner of the page left there
            params.pool.index_copy_(0, slot, block.view(shape.groups, -1))

    def leave(self, row: int) -> None:
        """Take the row's hot slots."""
        if row in self._seated:
            self._seated.remove(row)
            self.hot.leave(row)

    def resolve(self, layer: int, batch: DecodeBatch, selected: Tensor) -> Placement:
        """The resolve of DESIGN section 4."""
        begun = perf_counter_ns()
        params = self._params[layer]
        found = resolve(params, batch.lanes, selected, batch.lane_open_block, batch.host_blocks)
        params.counters[Counter.NANOSECONDS] += perf_counter_ns() - begun
        return Placement(found.slots, found.open_slot)

    def append(self, layer: int, batch: DecodeBatch, placement: Placement, records: Tensor) -> None:
        """Write through: hot slot and arena."""
        write_through(
            self._shape, batch, placement.open_slot, records, self.hot.pools[layer], self._arena[layer]
        )

    def pool(self, layer: int) -> Tensor:
        """The layer's hot slots."""
        shape = self._shape
        return self.hot.pools[layer].view(-1, shape.block_tokens, 2, shape.heads, shape.head_dim)

    def write(self, layer: int, chunk: PrefillChunk, records: Tensor) -> None:
        """Prefill writes the arena only; decode fetches what it chooses."""
        self._arena[layer].view(-1, self._shape.record_elements).index_copy_(0, chunk.host_records, records)

    def history(self, layer: int, chunk: PrefillChunk) -> tuple[Tensor, Tensor]:
        """From the arena."""
        return gather_history(self._shape, self._arena[layer], chunk.host_blocks, chunk.start)

    def hot_slots(self) -> SlotCount:
        """Of the hot buffer."""
        return SlotCount(self.hot.slots_total, self.hot.slots_used)

    def check_integrity(self) -> None:
        """The hot buffer's."""
        self.hot.check_integrity()
