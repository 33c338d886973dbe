"""The twins behind StepKernels: plain torch, on any device; the definition of every operation.

Knows nothing of padding rows: a twin's batch has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns

import torch
from torch import Tensor

from services.decoder.kernels.append import append, make_records
from services.decoder.kernels.attend import attend_slots
from services.decoder.kernels.attend_half import attend_half, split_of
from services.decoder.kernels.attend_part import Part, merge_parts
from services.decoder.kernels.bounds import BlockBounds, append_bounds, fill_bounds
from services.decoder.kernels.count import count
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gather_pages import gather_pages
from services.decoder.kernels.load_pages import load_pages
from services.decoder.kernels.replay import plan_of, replay
from services.decoder.kernels.resolve import resolve
from services.decoder.kernels.select import all_blocks, score_blocks, top_blocks
from services.decoder.kernels.step_kernels import LayerStore, MissPlan, Placement
from services.decoder.kernels.write_run import write_run


class Twins:
    """Implements StepKernels."""

    def select(self, batch: DecodeBatch, bounds: Tensor, query: Tensor, top_k: int) -> Tensor:
        """Top-k by upper bound; everything where everything fits the budget."""
        if batch.most_blocks <= top_k:
            return all_blocks(batch.open_block, batch.groups, batch.most_blocks).flatten(0, 1)
        scores = score_blocks(bounds, batch.row_device_pages, query, batch.groups)
        return top_blocks(scores, batch.open_block, top_k).flatten(0, 1)

    def resolve(
        self,
        batch: DecodeBatch,
        layer: LayerStore,
        selected: Tensor,
        *,
        followed: bool = False,
        later: bool = False,
    ) -> Placement:
        """kernels/resolve.py, timed where it fetches."""
        if later:
            apart = replace(layer, arena=None)
            found = resolve(apart, batch.lanes, selected, batch.lane_open_block, batch.host_blocks)
            own_plan, split = plan_of(found, batch.host_blocks), split_of(found, selected)
            return Placement(found.slots, found.open_slot, own_plan, split)
        begun = perf_counter_ns()
        found = resolve(layer, batch.lanes, selected, batch.lane_open_block, batch.host_blocks)
        layer.counters[Counter.NANOSECONDS] += perf_counter_ns() - begun
        plan = plan_of(found, batch.host_blocks) if followed else None
        return Placement(found.slots, found.open_slot, plan)

    def replay(self, layer: LayerStore, plan: MissPlan, *, ahead: bool = False) -> None:
        """kernels/replay.py, timed where it is waited for."""
        begun = perf_counter_ns()
        replay(layer, plan)
        if not ahead:
            layer.counters[Counter.NANOSECONDS] += perf_counter_ns() - begun

    def locate(self, batch: DecodeBatch, selected: Tensor, counters: Tensor) -> Placement:
        """A look-up in the rows' page tables."""
        blocks = batch.device_blocks
        absent = selected < 0
        slots = blocks.gather(1, selected.long().clamp_min(0)).masked_fill_(absent, -1)
        open_slot = blocks.gather(1, batch.lane_open_block.unsqueeze(1)).squeeze(1)
        chosen = selected.numel() - int(torch.count_nonzero(absent))
        count(counters, {Counter.CHOSEN: chosen, Counter.HITS: chosen})
        return Placement(slots.int(), open_slot.int())

    def append(
        self,
        batch: DecodeBatch,
        open_slot: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        arena: Tensor | None,
        bounds: BlockBounds | None,
    ) -> None:
        """Records on both sides, then the bounds."""
        records = make_records(key, value, batch.groups)
        opened = open_slot.long()
        if batch.lane_fresh is not None:
            # Whatever the slot held was another block's; the twin of attend multiplies it, if only by zero.
            pool[opened[batch.lane_fresh]] = 0
        append(
            records,
            pool.view(-1, records.shape[1]),
            opened * batch.block_tokens + batch.lane_offset,
            None if arena is None else arena.view(-1, records.shape[1]),
            batch.host_record,
        )
        if bounds is not None:
            device = bounds.device.flatten(0, 1)
            append_bounds(device, key, batch.index_block, batch.fresh)
            if bounds.arena is not None and batch.filled is not None:
                full = device.index_select(0, batch.index_block[batch.filled])
                bounds.arena.flatten(0, 1).index_copy_(0, batch.host_index_block[batch.filled], full)

    def attend(
        self, batch: DecodeBatch, query: Tensor, pool: Tensor, slots: Tensor, selected: Tensor, scaling: float
    ) -> Tensor:
        """kernels/attend.py."""
        return attend_slots(query, pool, slots, selected, batch.lane_length, scaling)

    def attend_half(
        self,
        batch: DecodeBatch,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        half: Tensor,
        scaling: float,
        *,
        joined: bool,
    ) -> Part:
        """kernels/attend_half.py."""
        return attend_half(query, pool, slots, half, batch.lane_length, scaling)

    def fill_bounds(self, bounds: Tensor, key: Tensor, block: Tensor, block_tokens: int) -> None:
        """kernels/bounds.py."""
        fill_bounds(bounds, key, block, block_tokens)

    def write_run(self, key: Tensor, value: Tensor, target: Tensor, pages: Tensor, first: int) -> None:
        """kernels/write_run.py."""
        write_run(key, value, target, pages, first)

    def gather_pages(self, source: Tensor, pages: Tensor, out: Tensor) -> None:
        """kernels/gather_pages.py."""
        gather_pages(source, pages, out)

    def load_pages(self, sources: Sequence[Tensor], targets: Sequence[Tensor], pages: Tensor) -> None:
        """kernels/load_pages.py."""
        load_pages(sources, targets, pages)

    def merge_parts(self, first: Part, second: Part, dtype: torch.dtype) -> Part:
        """kernels/attend_part.py."""
        return merge_parts(first, second, dtype)
