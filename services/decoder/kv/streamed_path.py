"""The way between a GPU and the arena: two streams of copies beside the one that computes.

Knows which bytes lie where, and the order that must hold; not what is computed meanwhile. Copies are the copy
engines': they take no multiprocessor from the products that they hide behind.

    read     arena --copy--> raw[0 | 1] --gather--> window --attention-->
    write    keys, values --> staged[0 | 1] --copy--> arena

Pages come to a raw window as they are; gathering them into token order takes a hundredth of the attention
over them, and frees the raw window for the next copy: of this layer, or the first of the next one.

The order, each rule by an event that one stream records and another waits for:
- a copy to a raw window waits for the writes of all earlier steps (`begin`);
- a raw window is filled again after it was gathered, a staged one after it was copied;
- what follows a step on the computing stream waits for its writes (`finish`), and has waited for its reads,
  since each was gathered. So once a step is done, no copy names its pages any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.kernels.gpu.host_memory import CHUNK_BYTES, copy_async
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.history import KeysValues, Run, Window, window_runs
from services.decoder.kv.page_bytes import Piece, cut_at_edges, page_pieces
from services.decoder.kv.shape import KvShape

_STAGED_SHARE = 4  # of a window's tokens: what is staged at once


class _Order(NamedTuple):
    """A window that will be asked for."""

    layer: int
    row: int
    run: Run
    pieces: list[Piece]


class StreamedPath:
    """An ArenaPath. All its memory is allocated at the start."""

    def __init__(
        self,
        kernels: StepKernels,
        arena: ArenaMap,
        shape: KvShape,
        window_tokens: int,
        device: torch.device,
        *,
        reads: bool,
        edge_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Allocate staging, and with `reads` the windows.

        Args:
            kernels: write and gather pages.
            arena: registered for the device.
            shape: the model's sizes.
            window_tokens: a multiple of page_tokens.
            device: a GPU.
            reads: history will be read here, too.
            edge_bytes: the arena is registered in pieces of this; no copy may span two.
        """
        self._kernels = kernels
        self._shape = shape
        self._arena = [arena.kv_blocks(layer).data_ptr() for layer in range(shape.layers)]
        self._offsets = [arena.layout.layer_offset("kv", layer) for layer in range(shape.layers)]
        self._edge_bytes = edge_bytes
        pages = window_tokens // shape.page_tokens
        self._staged_pages = max(1, pages // _STAGED_SHARE)
        self._staged = torch.zeros(
            2, self._staged_pages * shape.page_elements, dtype=shape.record_dtype, device=device
        )
        self._numbers = torch.arange(pages, dtype=torch.int32, device=device)
        self._turn = 0
        self.reader = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.writer = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # likewise
        self._copied_out, self._copied_in, self._gathered = (_two_events() for _ in range(3))
        self._orders: Iterator[_Order] = iter(())
        self._under_way: deque[tuple[_Order, int]] = deque()
        self._window: Window | None = None
        if reads:
            self._window = Window(kernels, shape, window_tokens, device)
            self._raw = torch.zeros(2, pages * shape.page_elements, dtype=shape.record_dtype, device=device)

    def begin(self, chunks: Sequence[PrefillChunk], *, reads: bool) -> None:
        """Start the first two copies behind everything that the computing stream was given so far."""
        self.finish()  # of a step that failed
        self._under_way.clear()
        self._orders = iter(())
        if not reads:
            return
        self.reader.wait_stream(torch.cuda.current_stream())
        self._orders = self._all_orders(chunks)
        for slot in range(2):
            self._copy_in(slot)

    def write(self, layer: int, chunk: PrefillChunk, key: Tensor, value: Tensor) -> None:
        """Stage the records as pages, and send these off."""
        size = self._shape.page_tokens
        for page in range(chunk.start // size, self._shape.pages_for(chunk.end), self._staged_pages):
            begin, end = max(chunk.start, page * size), min(chunk.end, (page + self._staged_pages) * size)
            own = slice(begin - chunk.start, end - chunk.start)
            numbers = chunk.arena_pages[page : self._shape.pages_for(end)].tolist()
            pieces = page_pieces(self._shape, numbers, begin % size, end - begin)
            self._copy_out(layer, key[own], value[own], begin % size, pieces)

    def windows(self, layer: int, chunk: PrefillChunk) -> Iterator[KeysValues]:
        """As begun: the copy is awaited, gathered, and its raw window is given to the copy after the next."""
        assert self._window is not None, "made without reads"
        for run in window_runs(chunk.start, self._window.tokens):
            order, slot = self._under_way.popleft()
            if (order.layer, order.row, order.run) != (layer, chunk.row, run):
                raise RuntimeError(f"layer {layer} asks for {run} of row {chunk.row}, {order} was copied")
            stream = torch.cuda.current_stream()
            stream.wait_event(self._copied_in[slot])
            tokens = run.end - run.start
            pages = self._numbers[: self._shape.pages_for(tokens)]
            found = self._window.gather(self._raw[slot], pages, tokens)
            self._gathered[slot].record(stream)
            self._copy_in(slot)
            yield found

    def finish(self) -> None:
        """The computing stream goes on when all is written."""
        torch.cuda.current_stream().wait_stream(self.writer)

    def _all_orders(self, chunks: Sequence[PrefillChunk]) -> Iterator[_Order]:
        assert self._window is not None, "made without reads"
        size = self._shape.page_tokens
        asked = []
        for chunk in chunks:
            pages = chunk.arena_pages.tolist()
            for run in window_runs(chunk.start, self._window.tokens):
                own = pages[run.start // size : -(-run.end // size)]
                asked.append((chunk.row, run, page_pieces(self._shape, own, 0, run.end - run.start)))
        for layer in range(self._shape.layers):
            for row, run, pieces in asked:
                yield _Order(layer, row, run, pieces)

    def _copy_in(self, slot: int) -> None:
        """Fill a raw window with what will be asked for next, if anything will."""
        order = next(self._orders, None)
        if order is None:
            return
        self.reader.wait_event(self._gathered[slot])
        target, source = self._raw[slot].data_ptr(), self._arena[order.layer]
        for arena, packed, size in cut_at_edges(order.pieces, self._offsets[order.layer], self._edge_bytes):
            copy_async(target + packed, source + arena, size, self.reader.cuda_stream)
        self._copied_in[slot].record(self.reader)
        self._under_way.append((order, slot))

    def _copy_out(self, layer: int, key: Tensor, value: Tensor, first: int, pieces: list[Piece]) -> None:
        slot, stream = self._turn, torch.cuda.current_stream()
        self._turn = 1 - slot
        stream.wait_event(self._copied_out[slot])
        staged = self._shape.as_pages(self._staged[slot])
        self._kernels.write_run(key, value, staged, self._numbers, first)
        self.writer.wait_stream(stream)
        target, source = self._arena[layer], self._staged[slot].data_ptr()
        for arena, packed, size in cut_at_edges(pieces, self._offsets[layer], self._edge_bytes):
            copy_async(target + arena, source + packed, size, self.writer.cuda_stream)
        self._copied_out[slot].record(self.writer)


def _two_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
