"""Decode on a GPU: one captured graph a batch size, one replay a step, nothing in between that waits.

Knows rows, tokens and positions; not whose they are. Batches are padded up to the next captured size; the
padding rows write nothing. Without graphs the same work is launched piece by piece and gives the same bits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from services.decoder.attention.heart import Heart
from services.decoder.attention.latent_heart import LatentHeart
from services.decoder.attention.latent_step import step_over
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.shape import KvShape
from services.decoder.models.causal_lm import CausalLM

_STRIDES = {4: 1, 16: 2, 32: 4, 64: 8, 256: 16}  # between sizes below each of these
_WIDEST_STRIDE = 64


def batch_sizes(max_rows: int) -> list[int]:
    """The sizes captured: few, and at most a quarter more than what runs; padding rows read experts too."""
    sizes, at = [], 1
    while at < max_rows:
        sizes.append(at)
        at += next((stride for below, stride in _STRIDES.items() if at < below), _WIDEST_STRIDE)
    return [*sizes, max_rows]


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """An older engine's graphs may be garbage by now, and to destroy one breaks a capture under way."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class DecodeGraphs:
    """Computes the logits of decode rows. One thread calls it."""

    def __init__(
        self,
        model: CausalLM,
        shape: KvShape,
        tables: RowTables,
        heart: Heart | LatentHeart,
        drawn: Tensor,
        max_blocks: int,
        *,
        capture: bool,
        sizes: Sequence[int] = (),
    ) -> None:
        """Make the inputs; with `capture`, graphs are captured by `warm_up`, before the first step.

        `drawn` [rows] int32 on the device holds the tokens that were drawn last. Batches are padded to
        `sizes`, ascending, by default those of `batch_sizes`.
        """
        self._model = model
        self._shape = shape
        self._tables = tables
        self._heart = heart
        self._drawn = drawn
        self._max_blocks = max_blocks
        self._capture = capture
        rows, self._device = tables.host_pages.shape[0], tables.host_pages.device
        self._sizes = list(sizes) or batch_sizes(rows)
        # seats, lengths, tokens of every row, the number of real rows, then the places of drawn tokens: one
        # copy a step, from a place that the copy three steps ago has left.
        pins = self._device.type == "cuda"
        self._staged = torch.zeros(3, 4 * rows + 1, dtype=torch.int32, pin_memory=pins)
        self._turn = 0
        self._inputs = torch.zeros(4 * rows + 1, dtype=torch.int32, device=self._device)
        self._inputs[rows : 2 * rows] = 1
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits: dict[int, Tensor] = {}

    @torch.inference_mode()
    def warm_up(self) -> Iterator[Tensor]:
        """Compile every kernel and capture every graph, the largest first: the others fit into its memory.

        Yields:
            [size, vocab] logits of each size, so that what comes after them can warm up too.
        """
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                logits = self._compute(size)  # no row is real yet, so nothing is written
            torch.cuda.current_stream().wait_stream(stream)
            if self._capture:
                graph = torch.cuda.CUDAGraph()
                with _nothing_collected(), torch.cuda.graph(graph, pool=pool):
                    logits = self._logits[size] = self._compute(size)
                self._graphs[size] = graph
            yield logits

    def run(
        self,
        rows: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int] = (),
        from_draw: Sequence[int] = (),
    ) -> Tensor:
        """The next token's logits. At most two runs may be under way.

        Args:
            rows: distinct rows of the tables.
            positions: of each row's newest token.
            tokens: the newest tokens.
            from_draw: instead of them, their places among the tokens that were drawn last.

        Returns:
            [rows and padding, vocab] float32, valid until the next call.
        """
        count = len(rows)
        size = next(size for size in self._sizes if size >= count)
        self._stage(rows, positions, tokens, from_draw)
        if not self._capture:
            return self._compute(size)
        self._graphs[size].replay()
        return self._logits[size]

    def _stage(
        self, rows: Sequence[int], positions: Sequence[int], tokens: Sequence[int], from_draw: Sequence[int]
    ) -> None:
        count, most = len(rows), self._tables.host_pages.shape[0]
        self._turn = (self._turn + 1) % 3
        staged = self._staged[self._turn].numpy()
        staged[:count] = rows
        staged[most : most + count] = positions
        staged[most : most + count] += 1
        staged[most + count : 2 * most] = 1  # a padding row has one token
        staged[2 * most : 2 * most + count] = 0 if from_draw else tokens
        staged[3 * most] = count
        staged[3 * most + 1 : 3 * most + 1 + len(from_draw)] = from_draw
        self._inputs.copy_(self._staged[self._turn], non_blocking=True)
        if from_draw:
            places = self._inputs[3 * most + 1 : 3 * most + 1 + count]
            torch.index_select(self._drawn, 0, places, out=self._inputs[2 * most : 2 * most + count])

    def _compute(self, size: int) -> Tensor:
        most = self._tables.host_pages.shape[0]
        seats, length = self._inputs[:size], self._inputs[most : most + size]
        batch = DecodeBatch(
            seats=seats,
            length=length,
            real_rows=self._inputs[3 * most : 3 * most + 1],
            host_pages=self._tables.host_pages,
            device_pages=self._tables.device_pages,
            groups=self._shape.groups,
            block_tokens=self._shape.block_tokens,
            blocks_per_page=self._shape.blocks_per_page,
            most_blocks=self._max_blocks,
        )
        # A row whose logits were no numbers drew -1. It ends once that is collected; until then it must not
        # take the others along.
        tokens = self._inputs[2 * most : 2 * most + size].clamp_min(0)
        hidden = self._model.decode_hidden(tokens, length - 1, step_over(self._heart, batch, ()))
        return self._model.decode_logits(hidden)
