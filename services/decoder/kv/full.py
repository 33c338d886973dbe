"""`kv_mode=full`: every row's whole history on the device, in pages; the baseline and the oracle.

Knows no LRU and no hot buffer: a block's place is its page's place. The arena is written through as in
`tiered`, so that pages can be matched, moved and resumed in either mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.places import blocks_of
from services.decoder.kernels.step_kernels import Placement, StepKernels
from services.decoder.kernels.upload import upload
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.arena_path import ArenaPath
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.history import KeysValues, Window, window_runs
from services.decoder.kv.hot_class import Resize
from services.decoder.kv.miss_curve import MissCurve
from services.decoder.kv.residence import SlotCount
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.shape import KvShape


class Full:
    """A Residence in which every chosen block is a hit."""

    def __init__(
        self,
        kernels: StepKernels,
        arena: ArenaMap,
        shape: KvShape,
        device_pages: int,
        tables: RowTables,
        path: ArenaPath,
        window: Window,
    ) -> None:
        """Allocate `device_pages` pages a layer on the tables' device; prefill writes through by `path`."""
        device = tables.device_pages.device
        self._kernels = kernels
        self._tables = tables
        self._shape = shape
        self._path = path
        self._window = window
        self._arena = [arena.kv_blocks(layer) for layer in range(shape.layers)]
        blocks = device_pages * shape.groups * shape.blocks_per_page
        self._pools = [
            torch.zeros(blocks, shape.block_elements, dtype=shape.record_dtype, device=device)
            for _ in range(shape.layers)
        ]
        self.counters = torch.zeros(shape.layers, len(Counter), dtype=torch.int64, device=device)
        self.curve: MissCurve | None = None  # nothing is ever missed

    def seat(self, row: int, tokens: int) -> None:
        """Clear the rest of the open block, which was another's: attend multiplies it, if only by zero."""
        shape = self._shape
        opened = (tokens - 1) // shape.block_tokens
        filled = tokens - opened * shape.block_tokens
        page, in_page = divmod(opened, shape.blocks_per_page)
        pages = self._tables.device_pages[row : row + 1, page : page + 1]
        place = blocks_of(pages, shape.groups, shape.blocks_per_page)[0, :, in_page]
        records = torch.arange(filled, shape.block_tokens, device=place.device)
        records = (place.unsqueeze(1) * shape.block_tokens + records).flatten()
        for pool in self._pools:
            pool.view(-1, shape.record_elements).index_fill_(0, records, 0)

    def load(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy them to the device."""
        if not pages:
            return
        there = upload(list(zip(*pages, strict=True)), self._pools[0].device)
        arena, pools = (
            [layer.view(-1, self._shape.page_elements) for layer in side]
            for side in (self._arena, self._pools)
        )
        self._kernels.load_pages(arena, pools, there)

    def leave(self, row: int) -> None:
        """Nothing to do: the pages are the scheduler's to give back."""

    def resize(self, resizes: Sequence[Resize]) -> None:
        """There is no hot buffer."""

    def resolve(self, layer: int, batch: DecodeBatch, selected: Tensor) -> Placement:
        """A look-up in the row's page table."""
        return self._kernels.locate(batch, selected, self.counters[layer])

    def follow(self, layer: int, batch: DecodeBatch, selected: Tensor, anchor: Placement) -> Placement:
        """Pages are the same in all layers."""
        return anchor

    def arrive(self, layer: int) -> None:
        """Nothing is ever fetched."""

    def append(
        self,
        layer: int,
        batch: DecodeBatch,
        placement: Placement,
        key: Tensor,
        value: Tensor,
        bounds: BlockBounds | None,
    ) -> None:
        """Write the device's page and the arena's."""
        pool, arena = self._pools[layer], self._arena[layer]
        self._kernels.append(batch, placement.open_slot, key, value, pool, arena, bounds)

    def pool(self, layer: int) -> Tensor:
        """The layer's pages, as blocks."""
        return self._shape.as_blocks(self._pools[layer])

    def begin(self, chunks: Sequence[PrefillChunk]) -> None:
        """The arena will be written to."""
        self._path.begin(chunks, reads=False)

    def write(self, layer: int, chunk: PrefillChunk, key: Tensor, value: Tensor) -> None:
        """Prefill writes the device and the arena."""
        first_page, first = divmod(chunk.start, self._shape.page_tokens)
        pages = chunk.device_pages[first_page:]
        self._kernels.write_run(key, value, self._shape.as_pages(self._pools[layer]), pages, first)
        self._path.write(layer, chunk, key, value)

    def history(self, layer: int, chunk: PrefillChunk) -> Iterator[KeysValues]:
        """From the device."""
        size = self._shape.page_tokens
        for start, end in window_runs(chunk.start, self._window.tokens):
            pages = chunk.device_pages[start // size : -(-end // size)]
            yield self._window.gather(self._pools[layer], pages, end - start)

    def finish(self) -> None:
        """The arena has it all."""
        self._path.finish()

    def settle(self) -> None:
        """Nothing to do: it was written through at once."""

    def abandon(self) -> None:
        """Nothing waits to be written."""

    def hot_slots(self) -> SlotCount:
        """There is no hot buffer."""
        return SlotCount(0, 0)

    def check_integrity(self) -> None:
        """Nothing that could disagree."""
