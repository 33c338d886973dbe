"""LatentKernels by launches on a GPU.

Knows which variant of which kernel a call needs, and the room for scores that launches share. Nothing here
waits for the device or reads from it, so decode's calls may be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.choose_tokens import IndexQuery, score_elements, score_pitch
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.append_entry import AppendEntryCall, AppendEntryShape
from services.decoder.kernels.gpu.attend_latent import (
    AttendLatentCall,
    AttendLatentShape,
    LatentVariant,
    PlainLatentShape,
)
from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.gpu.code_records import CodeRecordsCall, CodeRecordsShape
from services.decoder.kernels.gpu.pick_tokens import PickCall, PickShape
from services.decoder.kernels.gpu.score_tokens import ScoreCall, ScoreShape
from services.decoder.kernels.record_code import coded_bytes

_Shape = TypeVar("_Shape")
_CLUSTER = 8
"""Thread blocks of decode's attention that meet in shared memory, where there are clusters."""


class GpuLatentKernels:
    """Implements LatentKernels. One engine's: calls come from one thread, on one stream at a time."""

    def __init__(self, rows: int, max_tokens: int, heads: int, device: torch.device) -> None:
        """Allocate the room for scores; compile nothing yet.

        Args:
            rows: most rows of a batch, padding included.
            max_tokens: of the longest row.
            heads: query heads of the model.
            device: the GPU.
        """
        self._scores = torch.empty(score_elements(rows, max_tokens), dtype=torch.int32, device=device)
        self._cluster = _CLUSTER if Card.current().has_clusters else 1
        # Counts of who has arrived, zero between launches; a thread block serves 16 heads at least.
        arrivals = rows * -(-heads // 16) * _CLUSTER
        self._arrived = torch.zeros(arrivals, dtype=torch.int32, device=device)
        self._known: dict[object, object] = {}

    def observe(self, batch: DecodeBatch, keys: Tensor, arena: Tensor | None, key: Tensor) -> None:
        """kernels/gpu/append_entry.cu."""
        assert arena is not None, "a GPU maps the arena"
        shape = self._same(AppendEntryShape(key.shape[1] * key.element_size(), batch.blocks_per_page))
        call = AppendEntryCall(
            key=key.contiguous(),
            seats=batch.seats,
            length=batch.length,
            real_rows=batch.real_rows,
            host_pages=batch.host_pages,
            device_pages=batch.device_pages,
            device=keys,
            arena_pointer=arena.data_ptr(),
        )
        call.check(shape)
        call.launch(shape)

    def choose(self, batch: DecodeBatch, keys: Tensor, index: IndexQuery, top_k: int) -> Tensor:
        """score_tokens.cu and pick_tokens.cu; ascending, where the twin puts the best first."""
        width = min(top_k, batch.most_blocks)
        chosen = batch.seats.new_empty(index.query.shape[0], width)
        pitch = score_pitch(batch.device_pages.shape[1] * batch.blocks_per_page)
        if batch.most_blocks > width:
            shape = self._score_shape(index, keys, width, batch.blocks_per_page)
            score = ScoreCall(
                query=index.query.contiguous(),
                weight=index.weight.contiguous(),
                entries=keys,
                pages=batch.device_pages,
                seats=batch.seats,
                length=batch.length,
                real_rows=batch.real_rows,
                scores=self._scores,
                first=0,
                pitch=pitch,
            )
            score.check(shape)
            score.launch(shape)
        pick = PickCall(self._scores, batch.length, batch.real_rows, chosen, first=0, pitch=pitch)
        picking = self._same(PickShape(width))
        pick.check(picking)
        pick.launch(picking)
        return chosen

    def rank(
        self, pages: Tensor, page_tokens: int, start: int, keys: Tensor, index: IndexQuery, top_k: int
    ) -> Tensor:
        """As `choose`, for as many tokens at once as there is room for scores; ascending."""
        tokens = index.query.shape[0]
        width = min(top_k, start + tokens)
        chosen = torch.empty(tokens, width, dtype=torch.int32, device=keys.device)
        pitch = score_pitch(start + tokens)
        step = self._scores.numel() // pitch
        shape, picking = self._score_shape(index, keys, top_k, page_tokens), self._same(PickShape(top_k))
        query, weight = index.query.contiguous(), index.weight.contiguous()
        for at in range(0, tokens, step):
            some = slice(at, min(at + step, tokens))
            if start + some.stop > top_k:
                score = ScoreCall(
                    query=query[some],
                    weight=weight[some],
                    entries=keys,
                    pages=pages,
                    seats=None,
                    length=None,
                    real_rows=None,
                    scores=self._scores,
                    first=start + at,
                    pitch=pitch,
                )
                score.check(shape)
                score.launch(shape)
            pick = PickCall(self._scores, None, None, chosen[some], first=start + at, pitch=pitch)
            pick.check(picking)
            pick.launch(picking)
        return chosen

    def code(self, record: Tensor, latent: int) -> Tensor:
        """kernels/gpu/code_records.cu."""
        count, width = record.shape
        shape = self._same(CodeRecordsShape(latent, width - latent, record.dtype))
        size = coded_bytes(latent, width - latent)
        coded = torch.empty(count, size, dtype=torch.uint8, device=record.device)
        call = CodeRecordsCall(record.contiguous(), coded)
        call.check(shape)
        call.launch(shape)
        return coded

    def attend(
        self,
        batch: DecodeBatch,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        selected: Tensor,
        scaling: float,
        latent: int,
    ) -> Tensor:
        """kernels/gpu/attend_latent.cu or its plain form."""
        shape = self._attend_shape(query, pool, slots.shape[1], latent, self._cluster)
        out = query.new_empty(*query.shape[:2], latent)
        rows = (batch.length, batch.real_rows)
        self._attend(shape, query, pool, slots, selected, *rows, out, None, scaling)
        return out

    def attend_half(
        self,
        batch: DecodeBatch,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        half: Tensor,
        scaling: float,
        latent: int,
        *,
        joined: bool,
    ) -> Part:
        """The same kernels; the part's `out` is of the query's dtype."""
        shape = self._attend_shape(query, pool, slots.shape[1], latent, self._cluster)
        if joined:
            shape = self._same(replace(shape, overlaps=False))
        heads = query.shape[:2]
        part = Part(query.new_empty(*heads, latent), query.new_empty(heads, dtype=torch.float32))
        rows = (batch.length, batch.real_rows)
        self._attend(shape, query, pool, slots, half, *rows, part.out, part.lse, scaling)
        return part

    def attend_chosen(
        self, query: Tensor, record: Tensor, chosen: Tensor, scaling: float, latent: int
    ) -> Part:
        """The same kernels: a token of the prompt is a row, the records are the pool, all others unseen."""
        tokens, heads, _ = query.shape
        pool = record.unsqueeze(1)
        chosen = chosen.contiguous()
        shape = self._attend_shape(query, pool, chosen.shape[1], latent, 1)
        part = Part(
            query.new_empty(tokens, heads, latent), query.new_empty(tokens, heads, dtype=torch.float32)
        )
        length = chosen.new_full((tokens,), record.shape[0])
        real = chosen.new_full((1,), tokens)
        self._attend(shape, query, pool, chosen, chosen, length, real, part.out, part.lse, scaling, splits=1)
        return part

    def _attend(
        self,
        shape: LatentVariant,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        selected: Tensor,
        length: Tensor,
        real_rows: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scaling: float,
        *,
        splits: int = 0,
    ) -> None:
        """`splits` 0 leaves it to the shape."""
        splits = splits or shape.splits(slots.shape[1])
        partial = AttendLatentCall.workspace(shape, query.shape[0], query.shape[1], splits)
        call = AttendLatentCall(
            query=query.contiguous(),
            pool=pool,
            slots=slots,
            selected=selected,
            length=length,
            real_rows=real_rows,
            out=out,
            partial=torch.empty(partial, dtype=torch.float32, device=query.device),
            arrived=self._arrived,
            scaling=scaling,
            splits=splits,
            lse=lse,
        )
        call.check(shape)
        call.launch(shape)

    def _score_shape(self, index: IndexQuery, keys: Tensor, top_k: int, page_tokens: int) -> ScoreShape:
        _, heads, dim = index.query.shape
        coded = keys.dtype == torch.uint8
        return self._same(ScoreShape(dim, heads, top_k, page_tokens, index.query.dtype, coded))

    def _attend_shape(
        self, query: Tensor, pool: Tensor, top_k: int, latent: int, cluster: int
    ) -> LatentVariant:
        _, heads, record = query.shape
        block_tokens, coded = pool.shape[1], pool.dtype == torch.uint8
        roped = record - latent
        if AttendLatentShape.takes(latent, roped, query.dtype):
            sizes = (latent, roped, heads, block_tokens, query.dtype, cluster)
            return self._same(AttendLatentShape.fitting(*sizes, coded=coded))
        most_tokens = -(-top_k * block_tokens // 512) * 512  # few variants, whatever a prompt's width
        return self._same(
            PlainLatentShape(latent, roped, block_tokens, query.dtype, most_tokens, coded=coded)
        )

    def _same(self, shape: _Shape) -> _Shape:
        """The equal shape seen before, whose kernel is loaded, or this one."""
        known = self._known.setdefault(shape, shape)
        assert isinstance(known, type(shape))
        return known
