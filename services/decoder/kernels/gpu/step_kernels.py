"""StepKernels by launches on a GPU.

Knows which variant of which kernel a call needs; what a kernel does stands beside its source. Nothing here
waits for the device or reads from it, so every call may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.append import AppendCall, AppendShape
from services.decoder.kernels.gpu.attend import attended, shape_for
from services.decoder.kernels.gpu.fill_bounds import FillBoundsCall, FillBoundsShape
from services.decoder.kernels.gpu.gather_pages import GatherPagesCall, GatherPagesShape
from services.decoder.kernels.gpu.load_pages import LoadPagesCall, LoadPagesShape
from services.decoder.kernels.gpu.locate import LocateCall, LocateShape
from services.decoder.kernels.gpu.merge_parts import merged, shape_of
from services.decoder.kernels.gpu.replay import ReplayCall, ReplayShape
from services.decoder.kernels.gpu.resolve import ResolveCall, ResolveShape
from services.decoder.kernels.gpu.select import SelectCall, SelectShape
from services.decoder.kernels.gpu.token_sides import sides_of, whole_tokens
from services.decoder.kernels.gpu.write_run import WriteRunCall, WriteRunShape
from services.decoder.kernels.step_kernels import LayerStore, MissPlan, Placement, Split

_Shape = TypeVar("_Shape")


class GpuKernels:
    """Implements StepKernels. One engine's: calls come from one thread, one at a time."""

    def __init__(self, rows: int, kv_heads: int, device: torch.device, *, skip_io: bool = False) -> None:
        """Compile nothing yet.

        Args:
            rows: most rows of a batch, padding included.
            kv_heads: of the model.
            device: the GPU.
            skip_io: resolve moves no bytes (a probe: attention reads garbage).
        """
        self._skip_io = skip_io
        # Counts of who has arrived, zero between launches.
        self._select_arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
        self._attend_arrived = torch.zeros(rows * kv_heads, dtype=torch.int32, device=device)
        self._waited_until = torch.zeros(1, dtype=torch.int64, device=device)  # of all layers: one clock
        self._known: dict[object, object] = {}
        self._fitting: dict[tuple[int, int, int, int, int, bool], ResolveShape] = {}

    def select(self, batch: DecodeBatch, bounds: Tensor, query: Tensor, top_k: int) -> Tensor:
        """kernels/gpu/select.cu; ascending, where the twin puts the best first."""
        rows, query_heads, head_dim = query.shape
        kv_heads = bounds.shape[2]
        shape = self._same(
            SelectShape(
                head_dim=head_dim,
                kv_heads=kv_heads,
                groups=batch.groups,
                group_size=query_heads // kv_heads,
                block_tokens=batch.block_tokens,
                blocks_per_page=batch.blocks_per_page,
                top_k=min(top_k, batch.most_blocks),
                dtype=query.dtype,
            )
        )
        pages = batch.device_pages.shape[1]
        call = SelectCall(
            query=query,
            bounds=bounds,
            seats=batch.seats,
            length=batch.length,
            real_rows=batch.real_rows,
            device_pages=batch.device_pages,
            selected=batch.seats.new_empty(rows * batch.groups, shape.top_k),
            keys=batch.seats.new_empty(SelectCall.workspace(shape, rows, pages)),
            arrived=self._select_arrived,
        )
        call.check(shape)
        call.launch(shape)
        return call.selected

    def resolve(
        self,
        batch: DecodeBatch,
        layer: LayerStore,
        selected: Tensor,
        *,
        followed: bool = False,
        later: bool = False,
    ) -> Placement:
        """kernels/gpu/resolve.cu, with the widest clusters that all run at once."""
        lanes, top_k = selected.shape
        block_bytes = layer.pool.shape[1] * layer.pool.element_size()
        skip_io = self._skip_io or later
        sizes = (block_bytes, top_k, layer.tables.parcels.shape[1], layer.tables.parcel_slots, lanes)
        shape = self._fitting.get((*sizes, skip_io))
        if shape is None:
            shape = self._same(ResolveShape.fitting(*sizes, skip_io=skip_io))
            self._fitting[(*sizes, skip_io)] = shape
        placement = _placement(selected)
        if followed or later:
            count = torch.empty_like(placement.open_slot)
            plan = MissPlan(torch.empty_like(selected), torch.empty_like(selected), count)
            placement = placement._replace(plan=plan)
        if later:
            split = Split(torch.empty_like(selected), torch.empty_like(selected))
            placement = placement._replace(split=split)
        call = ResolveCall(
            tables=layer.tables,
            selected=selected,
            length=batch.length,
            seats=batch.seats,
            real_rows=batch.real_rows,
            host_pages=batch.host_pages,
            arena_pointer=_reached(layer.arena).data_ptr(),
            pool=layer.pool,
            counters=layer.counters,
            slots=placement.slots,
            open_slot=placement.open_slot,
            groups=batch.groups,
            blocks_per_page=batch.blocks_per_page,
            block_tokens=batch.block_tokens,
            waited_until=None if later else self._waited_until,
            plan=placement.plan,
            split=placement.split,
        )
        call.check(shape)
        call.launch(shape)
        return placement

    def replay(self, layer: LayerStore, plan: MissPlan, *, ahead: bool = False) -> None:
        """kernels/gpu/replay.cu."""
        block_bytes = layer.pool.shape[1] * layer.pool.element_size()
        shape = self._same(ReplayShape(block_bytes, skip_io=self._skip_io, ahead=ahead))
        arena = _reached(layer.arena).data_ptr()
        clock = None if ahead else self._waited_until
        call = ReplayCall(plan, arena, layer.pool, layer.counters, waited_until=clock)
        call.check(shape)
        call.launch(shape)

    def locate(self, batch: DecodeBatch, selected: Tensor, counters: Tensor) -> Placement:
        """kernels/gpu/locate.cu."""
        shape = self._same(
            LocateShape(selected.shape[1], batch.groups, batch.block_tokens, batch.blocks_per_page)
        )
        placement = _placement(selected)
        call = LocateCall(
            selected=selected,
            seats=batch.seats,
            length=batch.length,
            real_rows=batch.real_rows,
            device_pages=batch.device_pages,
            slots=placement.slots,
            open_slot=placement.open_slot,
            counters=counters,
        )
        call.check(shape)
        call.launch(shape)
        return placement

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
        """kernels/gpu/append.cu."""
        sides = sides_of(value)
        key, value = whole_tokens(key), whole_tokens(value) if sides == 2 else value
        _, kv_heads, head_dim = key.shape
        shape = self._same(
            AppendShape(
                head_dim,
                kv_heads,
                batch.groups,
                batch.block_tokens,
                batch.blocks_per_page,
                key.dtype,
                sides=sides,
            )
        )
        call = AppendCall(
            key=key,
            value=value,
            open_slot=open_slot,
            seats=batch.seats,
            length=batch.length,
            real_rows=batch.real_rows,
            host_pages=batch.host_pages,
            device_pages=batch.device_pages,
            pool=pool,
            arena_pointer=_reached(arena).data_ptr(),
            bounds=None if bounds is None else bounds.device,
            arena_bounds_pointer=0 if bounds is None else _reached(bounds.arena).data_ptr(),
        )
        call.check(shape)
        call.launch(shape)

    def attend(
        self, batch: DecodeBatch, query: Tensor, pool: Tensor, slots: Tensor, selected: Tensor, scaling: float
    ) -> Tensor:
        """kernels/gpu/attend.cu."""
        shape = self._same(shape_for(query, pool, slots.shape[0], batch))
        call = attended(shape, batch, query, pool, slots, selected, scaling, self._attend_arrived)
        call.check(shape)
        call.launch(shape)
        return call.out

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
        """kernels/gpu/attend.cu; the part's `out` is of the query's dtype."""
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        shape = self._same(shape_for(query, pool, slots.shape[0], batch, overlaps=not joined))
        call = attended(shape, batch, query, pool, slots, half, scaling, self._attend_arrived, lse)
        call.check(shape)
        call.launch(shape)
        return Part(call.out, lse)

    def fill_bounds(self, bounds: Tensor, key: Tensor, block: Tensor, block_tokens: int) -> None:
        """kernels/gpu/fill_bounds.cu."""
        key = whole_tokens(key)
        shape = self._same(FillBoundsShape(key.shape[1], key.shape[2], block_tokens, key.dtype))
        call = FillBoundsCall(bounds, key, block)
        call.check(shape)
        call.launch(shape)

    def write_run(self, key: Tensor, value: Tensor, target: Tensor, pages: Tensor, first: int) -> None:
        """kernels/gpu/write_run.cu."""
        sides = sides_of(value)
        key, value = whole_tokens(key), whole_tokens(value) if sides == 2 else value
        _, kv_heads, head_dim = key.shape
        groups, page_tokens = target.shape[1:3]
        head_bytes = head_dim * key.element_size()
        shape = self._same(WriteRunShape(kv_heads, groups, head_bytes, page_tokens, sides))
        call = WriteRunCall(key, value, target, pages, first)
        call.check(shape)
        call.launch(shape)

    def gather_pages(self, source: Tensor, pages: Tensor, out: Tensor) -> None:
        """kernels/gpu/gather_pages.cu."""
        group_bytes = source.shape[2] * source.shape[3] * source.element_size()
        shape = self._same(GatherPagesShape(source.shape[1], group_bytes))
        call = GatherPagesCall(source, pages, out)
        call.check(shape)
        call.launch(shape)

    def load_pages(self, sources: Sequence[Tensor], targets: Sequence[Tensor], pages: Tensor) -> None:
        """kernels/gpu/load_pages.cu."""
        page_bytes = targets[0].shape[1] * targets[0].element_size()
        shape = self._same(LoadPagesShape(page_bytes))
        call = LoadPagesCall(sources, targets, pages)
        call.check(shape)
        call.launch(shape)

    def merge_parts(self, first: Part, second: Part, dtype: torch.dtype) -> Part:
        """kernels/gpu/merge_parts.cu."""
        call = merged(first, second, dtype)
        shape = self._same(shape_of(call))
        call.check(shape)
        call.launch(shape)
        return call.out

    def _same(self, shape: _Shape) -> _Shape:
        """The equal shape seen before, whose kernel is loaded, or this one."""
        known = self._known.setdefault(shape, shape)
        assert isinstance(known, type(shape))
        return known


def _reached(arena: Tensor | None) -> Tensor:
    """Memory that the GPU reaches itself; without it kernels cannot do these operations."""
    assert arena is not None, "a GPU maps the arena"
    return arena


def _placement(selected: Tensor) -> Placement:
    return Placement(
        torch.empty_like(selected),
        torch.empty(selected.shape[0], dtype=torch.int32, device=selected.device),
    )
