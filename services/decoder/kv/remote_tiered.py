"""`tiered` over an arena that this engine cannot map: what misses is asked for, once a layer for all lanes.

Knows how hot buffer and store are kept in step; which blocks are read is the selector's choice. A step's new
records are taken from the hot slots that they were appended to, and written together when the step settles.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns

import numpy as np
from torch import Tensor

from services.contract.slot_request import Pieces
from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.replay import fetches
from services.decoder.kernels.step_kernels import MissPlan, Placement, StepKernels
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.remote_arena import RemoteArena
from services.decoder.kv.remote_path import RemotePath
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.tiered import Tiered


class RemoteTiered(Tiered):
    """A Residence whose every method that reads or settles raises as RemoteArena does."""

    def __init__(
        self, kernels: StepKernels, arena: RemoteArena, hot: HotBuffer, tables: RowTables, path: RemotePath
    ) -> None:
        super().__init__(kernels, None, hot, tables, path)
        self._arena = arena
        shape = hot.shape
        self._blocks_of_page = shape.groups * shape.blocks_per_page
        self._record_bytes = shape.record_elements * shape.record_dtype.itemsize

    def resolve(self, layer: int, batch: DecodeBatch, selected: Tensor) -> Placement:
        """The resolve of DESIGN section 4, and then the fetch of what it plans."""
        placement = self._kernels.resolve(batch, self._layers[layer], selected, followed=True)
        assert placement.plan is not None, "asked for"
        self._fetch(layer, placement.plan)
        return placement

    def follow(self, layer: int, batch: DecodeBatch, selected: Tensor, anchor: Placement) -> Placement:
        """The anchor's slots, filled with this layer's bytes."""
        assert anchor.plan is not None, "resolve always plans here"
        misses = self._fetch(layer, anchor.plan)
        self.counters[layer, Counter.MISSES] += misses
        self.counters[layer, Counter.FETCHED_BYTES] += misses * self._shape.block_bytes
        return anchor

    def append(
        self,
        layer: int,
        batch: DecodeBatch,
        placement: Placement,
        key: Tensor,
        value: Tensor,
        bounds: BlockBounds | None,
    ) -> None:
        """To the hot slot; staged for the arena."""
        super().append(layer, batch, placement, key, value, bounds)
        shape = self._shape
        records = self._layers[layer].pool.view(-1, shape.record_elements)
        own = placement.open_slot.long() * shape.block_tokens + batch.lane_offset
        of_page = self._blocks_of_page * shape.block_tokens
        place = batch.host_record.numpy()
        offsets = place % of_page * self._record_bytes
        pieces = self._arena.pieces("kv", layer, place // of_page, offsets, self._record_bytes)
        self._arena.stage(pieces, records.index_select(0, own))

    def settle(self) -> None:
        """Write what was staged, and wait until it is there."""
        self._arena.settle()

    def abandon(self) -> None:
        """Nothing of it is written."""
        self._arena.drop()

    def _open_blocks(self, home: Tensor) -> Iterator[Tensor]:
        shape = self._shape
        pieces = [self._pieces(layer, home) for layer in range(shape.layers)]
        found = self._arena.read(np.concatenate(pieces)).view(shape.record_dtype)
        yield from found.view(shape.layers, -1, shape.block_elements)

    def _fetch(self, layer: int, plan: MissPlan) -> int:
        """Bring what a plan names; how many blocks that were."""
        begun = perf_counter_ns()
        source, target = fetches(plan)
        misses = target.shape[0]
        if misses:
            found = self._arena.read(self._pieces(layer, source)).view(self._shape.record_dtype)
            self._layers[layer].pool.index_copy_(0, target, found.view(misses, -1))
        self.counters[layer, Counter.NANOSECONDS] += perf_counter_ns() - begun
        return misses

    def _pieces(self, layer: int, blocks: Tensor) -> Pieces:
        """[n] pieces: blocks `[n]` int64 of a layer's arena region."""
        page, block = np.divmod(blocks.numpy(), self._blocks_of_page)
        size = self._shape.block_bytes
        return self._arena.pieces("kv", layer, page, block * size, size)
