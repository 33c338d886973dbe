"""`kv_mode=tiered`: the arena holds every row's whole history, the hot buffer what attention reads.

Knows how the two are kept in step; which blocks are read is the selector's choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.places import blocks_of
from services.decoder.kernels.step_kernels import LayerStore, Placement, StepKernels
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.arena_path import ArenaPath
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.history import KeysValues
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.hot_class import Resize
from services.decoder.kv.miss_curve import LaneChoice, MissCurve
from services.decoder.kv.prefetch import Prefetch
from services.decoder.kv.residence import SlotCount
from services.decoder.kv.row_tables import RowTables


class Tiered:
    """The Residence of DESIGN section 3."""

    def __init__(
        self,
        kernels: StepKernels,
        arena: ArenaMap | None,
        hot: HotBuffer,
        tables: RowTables,
        path: ArenaPath,
        curve: MissCurve | None = None,
        prefetch: Prefetch | None = None,
        hits_first: Prefetch | None = None,
    ) -> None:
        """Without an arena in reach, remote_tiered.py brings the bytes.

        `curve` is told what its layers choose; it reads every choice on the host, so only on a CPU. With
        `prefetch`, layers that follow a choice get their misses as soon as it is placed. With `hits_first`,
        which is the same one where both are, no layer waits for its misses before `arrive`.
        """
        shape = hot.shape
        self.hot = hot
        self.curve = curve
        self._kernels = kernels
        self._shape = shape
        self._tables = tables
        self._path = path
        self._prefetch = prefetch
        self._hits_first = hits_first
        device = tables.host_pages.device
        self.counters = torch.zeros(shape.layers, len(Counter), dtype=torch.int64, device=device)
        self._layers = [
            LayerStore(
                hot.tables[layer],
                hot.pools[layer],
                None if arena is None else arena.kv_blocks(layer),
                self.counters[layer],
            )
            for layer in range(shape.layers)
        ]
        # A resolve that leaves its fetches to a replay has counted them.
        counted = torch.zeros_like(self.counters[0])
        self._counted = [replace(store, counters=counted) for store in self._layers]

    def seat(self, row: int, tokens: int) -> None:
        """Let `row` use its hot slots, and load the filled part of its open block."""
        shape = self._shape
        opened = (tokens - 1) // shape.block_tokens
        filled = tokens - opened * shape.block_tokens
        self.hot.seat(row, opened)
        page, in_page = divmod(opened, shape.blocks_per_page)
        pages = self._tables.host_pages[row : row + 1, page : page + 1]
        home = blocks_of(pages, shape.groups, shape.blocks_per_page)[0, :, in_page]
        places = zip(self._layers, self.hot.open_slots(row), self._open_blocks(home), strict=True)
        for store, opened_slots, found in places:
            block = found.view(shape.groups, shape.block_tokens, -1)
            block[:, filled:].zero_()  # whatever an earlier owner of the page left there
            store.pool.index_copy_(0, opened_slots, block.view(shape.groups, -1))

    def load(self, pages: Sequence[tuple[int, int]]) -> None:
        """Nothing to do: history is read in the arena."""

    def leave(self, row: int) -> None:
        """Take the row's hot slots."""
        self.hot.leave(row)
        if self.curve is not None:
            self.curve.leave(row)

    def resize(self, resizes: Sequence[Resize]) -> None:
        """Of the hot buffer; bytes move on the device where a row shrinks."""
        self.hot.resize(resizes)

    def resolve(self, layer: int, batch: DecodeBatch, selected: Tensor) -> Placement:
        """The resolve of DESIGN section 4."""
        if self.curve is not None and layer in self.curve.layers:
            self.curve.note(layer, self._choices(layer, batch, selected))
        followers = self._shape.followers(layer)
        later = self._hits_first is not None
        placement = self._kernels.resolve(
            batch, self._layers[layer], selected, followed=bool(followers), later=later
        )
        beside = self._hits_first or self._prefetch
        if beside is not None and placement.plan is not None:
            replay = partial(self._kernels.replay, ahead=True)
            own = {layer: partial(replay, self._counted[layer], placement.plan)} if later else {}
            ahead = followers if self._prefetch is not None else ()
            beside.start(own | {each: partial(replay, self._layers[each], placement.plan) for each in ahead})
        return placement

    def _choices(self, layer: int, batch: DecodeBatch, selected: Tensor) -> Iterator[LaneChoice]:
        """What one group chose in each row: another group in each layer, and always the same one there."""
        groups = self._shape.groups
        chosen = selected.view(-1, groups, selected.shape[1])[:, layer % groups].numpy()
        capacity = self._layers[layer].tables.capacity.index_select(0, batch.seats).tolist()
        opened = batch.open_block.tolist()
        for place, row in enumerate(batch.seats.tolist()):
            yield LaneChoice(row, capacity[place], opened[place], chosen[place])

    def follow(self, layer: int, batch: DecodeBatch, selected: Tensor, anchor: Placement) -> Placement:
        """The anchor's slots, filled with this layer's bytes."""
        assert anchor.plan is not None, "a layer that is followed plans"
        if self._hits_first is not None:
            if self._prefetch is None:
                replay = partial(self._kernels.replay, self._layers[layer], anchor.plan, ahead=True)
                self._hits_first.start({layer: replay})
        elif self._prefetch is None:
            self._kernels.replay(self._layers[layer], anchor.plan)
        else:
            self._prefetch.wait(layer)
        return anchor

    def arrive(self, layer: int) -> None:
        """Where misses come beside the computation, wait for the layer's."""
        if self._hits_first is not None:
            self._hits_first.wait(layer)

    def append(
        self,
        layer: int,
        batch: DecodeBatch,
        placement: Placement,
        key: Tensor,
        value: Tensor,
        bounds: BlockBounds | None,
    ) -> None:
        """Write through: hot slot and arena."""
        store = self._layers[layer]
        self._kernels.append(batch, placement.open_slot, key, value, store.pool, store.arena, bounds)

    def pool(self, layer: int) -> Tensor:
        """The layer's hot slots."""
        return self._shape.as_blocks(self.hot.pools[layer])

    def begin(self, chunks: Sequence[PrefillChunk]) -> None:
        """History will come from the arena."""
        self._path.begin(chunks, reads=True)

    def write(self, layer: int, chunk: PrefillChunk, key: Tensor, value: Tensor) -> None:
        """Prefill writes the arena only; decode fetches what it chooses."""
        self._path.write(layer, chunk, key, value)

    def history(self, layer: int, chunk: PrefillChunk) -> Iterator[KeysValues]:
        """From the arena."""
        return self._path.windows(layer, chunk)

    def finish(self) -> None:
        """The arena has it all."""
        self._path.finish()

    def settle(self) -> None:
        """Nothing to do: it was written through at once."""

    def abandon(self) -> None:
        """Nothing waits to be written."""

    def hot_slots(self) -> SlotCount:
        """Of the hot buffer."""
        return SlotCount(self.hot.slots_total, self.hot.slots_used)

    def check_integrity(self) -> None:
        """The hot buffer's."""
        self.hot.check_integrity()

    def _open_blocks(self, home: Tensor) -> Iterator[Tensor]:
        """By layer, a copy of blocks `[groups]` int64 of the arena: [groups, block elements]."""
        for store in self._layers:
            assert store.arena is not None, "in reach"
            yield store.arena.index_select(0, home)
