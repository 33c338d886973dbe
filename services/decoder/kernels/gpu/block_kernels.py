"""BlockKernels by launches on a GPU; what is small in NSA, a model of ours, by torch's operations.

Knows which variant of which kernel a call needs, and the room for scores that launches share. Nothing here
waits for the device or reads from it, so decode's calls may be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from services.decoder.kernels.attend_entries import attend_entries
from services.decoder.kernels.attend_masked import Sight
from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.block_kernels import Look
from services.decoder.kernels.choose_tokens import score_elements, score_pitch
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.gpu.add_entry import AddEntryCall, AddEntryShape
from services.decoder.kernels.gpu.append_entry import AppendEntryCall, AppendEntryShape
from services.decoder.kernels.gpu.attend import AttendCall, AttendShape
from services.decoder.kernels.gpu.pick_tokens import PickCall, PickShape
from services.decoder.kernels.gpu.score_blocks import ScoreBlocksCall, ScoreBlocksShape

_Shape = TypeVar("_Shape")


class GpuBlockKernels:
    """Implements BlockKernels. One engine's: calls come from one thread, on one stream at a time."""

    def __init__(self, rows: int, max_blocks: int, groups: int, device: torch.device) -> None:
        """Allocate the room for scores; compile nothing yet.

        Args:
            rows: most rows of a batch, padding included.
            max_blocks: of the longest row.
            groups: of a row.
            device: the GPU.
        """
        self._scores = torch.empty(
            score_elements(rows * groups, max_blocks), dtype=torch.int32, device=device
        )
        # Counts of who has arrived, zero between launches.
        self._arrived = torch.zeros(rows * groups, dtype=torch.int32, device=device)
        self._known: dict[object, object] = {}

    def observe(self, batch: DecodeBatch, keys: Tensor, arena: Tensor | None, key: Tensor) -> None:
        """kernels/gpu/append_entry.cu: the keys of a page lie in the order of its tokens."""
        page_tokens = batch.blocks_per_page * batch.block_tokens
        shape = self._same(AppendEntryShape(key.shape[1] * key.element_size(), page_tokens))
        call = AppendEntryCall(
            key=key.contiguous(),
            seats=batch.seats,
            length=batch.length,
            real_rows=batch.real_rows,
            host_pages=batch.host_pages,
            device_pages=batch.device_pages,
            device=keys.flatten(0, 2),
            arena_pointer=_reached(arena).data_ptr(),
        )
        call.check(shape)
        call.launch(shape)

    def choose(self, batch: DecodeBatch, keys: Tensor, query: Tensor, top_k: int) -> Tensor:
        """score_blocks.cu and pick_tokens.cu; ascending, where the twin puts the best first."""
        if batch.most_blocks > top_k:
            self._score(
                ScoreBlocksCall(
                    query=query.contiguous(),
                    keys=keys,
                    pages=batch.device_pages,
                    seats=batch.seats,
                    length=batch.length,
                    scores=self._scores,
                    blocks=batch.most_blocks,
                    first=0,
                    pitch=score_pitch(batch.most_blocks),
                ),
                top_k,
            )
        return self._pick(batch.lane_blocks, query.shape[1], score_pitch(batch.most_blocks), top_k)

    def rank(self, pages: Tensor, start: int, keys: Tensor, query: Tensor, top_k: int) -> Tensor:
        """As `choose`, for as many tokens at once as there is room for scores."""
        tokens, groups, _ = query.shape
        block_tokens = keys.shape[2]
        position = torch.arange(start, start + tokens, device=keys.device)
        blocks = (start + tokens - 1) // block_tokens + 1
        pitch = score_pitch(blocks)
        step = self._scores.numel() // (groups * pitch)
        query = query.contiguous()
        parts = []
        for first in range(0, tokens, step):
            some = slice(first, min(first + step, tokens))
            if blocks > top_k:
                self._score(
                    ScoreBlocksCall(
                        query=query[some],
                        keys=keys,
                        pages=pages,
                        seats=None,
                        length=None,
                        scores=self._scores,
                        blocks=blocks,
                        first=start + first,
                        pitch=pitch,
                    ),
                    top_k,
                )
            parts.append(self._pick(_count(position[some] // block_tokens, groups), groups, pitch, top_k))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add(self, batch: DecodeBatch, entries: Tensor, arena: Tensor | None, added: Tensor) -> None:
        """kernels/gpu/add_entry.cu."""
        tokens = batch.block_tokens // entries.shape[2]
        page_tokens = batch.blocks_per_page * batch.block_tokens
        shape = self._same(AddEntryShape(entries[0, 0, 0].numel(), tokens, page_tokens, entries.dtype))
        call = AddEntryCall(
            added=added.to(entries.dtype).flatten(1).contiguous(),
            seats=batch.seats,
            length=batch.length,
            real_rows=batch.real_rows,
            host_pages=batch.host_pages,
            device_pages=batch.device_pages,
            device=entries.flatten(0, 2).flatten(1),
            arena_pointer=_reached(arena).data_ptr(),
        )
        call.check(shape)
        call.launch(shape)

    def look(self, batch: DecodeBatch, entries: Tensor, query: Tensor) -> Look:
        """kernels/attend_entries.py over whatever the longest row could have, of all rows at once."""
        each = entries.shape[2]
        own = entries[batch.row_device_pages].flatten(
            1, 3
        )  # [R, entries of all pages, 2, kv_heads, head_dim]
        tokens = batch.block_tokens // each
        out, scores = attend_entries(query.unsqueeze(1), batch.position.unsqueeze(1), own, tokens, each)
        return Look(out.squeeze(1), scores.squeeze(1))

    def best(self, scores: Tensor, own: Tensor, top_k: int) -> Tensor:
        """pick_tokens.cu; ascending, where the twin puts the best first."""
        tokens, groups, blocks = scores.shape
        pitch = score_pitch(blocks)
        # Floats that are not negative compare as their bits do.
        room = self._scores.view(torch.float32)[: tokens * groups * pitch].view(tokens, groups, pitch)
        is_own = torch.arange(blocks, device=own.device) == own.view(-1, 1, 1)
        most = torch.full_like(scores, float("inf"))
        torch.where(is_own, most, scores, out=room[..., :blocks])
        return self._pick(_count(own, groups), groups, pitch, top_k)

    def attend_newest(
        self,
        batch: DecodeBatch,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        selected: Tensor,
        scaling: float,
        window: int,
    ) -> Tensor:
        """kernels/gpu/attend.cu with a window."""
        rows = (batch.length, batch.real_rows)
        return self._attend(query, pool, slots, selected, *rows, scaling, window).out

    def attend_chosen(
        self, query: Tensor, key: Tensor, value: Tensor, first: int, sight: Sight, scaling: float
    ) -> Part:
        """attend.cu too: a token of the prompt is a row, the part's tokens are a pool, block by block."""
        tokens = query.shape[0]
        count, groups, head_dim = key.shape
        blocks = -(-count // sight.block_tokens)
        pool = key.new_empty(groups, blocks * sight.block_tokens, 2, head_dim)
        pool[:, :count, 0], pool[:, :count, 1] = key.transpose(0, 1), value.transpose(0, 1)
        near = (sight.blocks - first // sight.block_tokens).expand(-1, groups, -1)
        outside = (near < 0) | (near >= blocks)
        selected = near.masked_fill(outside, -1).flatten(0, 1)
        group = torch.arange(groups, dtype=torch.int32, device=key.device).view(1, -1, 1)
        slots = (near + group * blocks).masked_fill(outside, -1).flatten(0, 1)
        begin = sight.start + 1 - first
        length = torch.arange(begin, begin + tokens, dtype=torch.int32, device=key.device)
        return self._attend(
            query,
            pool.view(-1, sight.block_tokens, 2, 1, head_dim),
            slots,
            selected,
            length,
            length.new_full((1,), tokens),
            scaling,
            sight.window,
            with_lse=True,
        )

    def _attend(
        self,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        selected: Tensor,
        length: Tensor,
        real_rows: Tensor,
        scaling: float,
        window: int,
        *,
        with_lse: bool = False,
    ) -> Part:
        """Over uncut lanes and with its `lse`, or as fast as it goes: then `lse` means nothing."""
        rows, query_heads, head_dim = query.shape
        lanes, heads = slots.shape[0], pool.shape[3]
        group_size = query_heads * rows // (lanes * heads)
        fitting = AttendShape.fitting(head_dim, group_size, pool.shape[1], query.dtype, lanes * heads)
        shape = self._same(replace(fitting, window=window))
        splits = 1 if with_lse else shape.splits(slots.shape[1])
        lse = query.new_empty(rows, query_heads, dtype=torch.float32)
        call = AttendCall(
            query=query.contiguous(),
            pool=pool,
            slots=slots.contiguous(),
            selected=selected.contiguous(),
            length=length,
            real_rows=real_rows,
            out=query.new_empty(query.shape),
            partial=lse.new_empty(AttendCall.workspace(shape, lanes * heads, splits)),
            arrived=self._arrived,
            groups=lanes // rows,
            scaling=scaling,
            splits=splits,
            lse=lse if with_lse else None,
        )
        call.check(shape)
        call.launch(shape)
        return Part(call.out, lse)

    def _score(self, call: ScoreBlocksCall, top_k: int) -> None:
        """Into the room for scores."""
        _, heads, dim = call.query.shape
        _, per_page, block_tokens, _ = call.keys.shape
        shape = self._same(ScoreBlocksShape(heads, dim, block_tokens, per_page, top_k, call.query.dtype))
        call.check(shape)
        call.launch(shape)

    def _pick(self, count: Tensor, groups: int, pitch: int, top_k: int) -> Tensor:
        """[T, groups, top_k] int32 of what is scored there; `count` [T * groups] int32 blocks are seen."""
        chosen = count.new_empty(count.shape[0], top_k)
        pick = PickCall(self._scores, count, None, chosen, first=0, pitch=pitch)
        shape = self._same(PickShape(top_k))
        pick.check(shape)
        pick.launch(shape)
        return chosen.view(-1, groups, top_k)

    def _same(self, shape: _Shape) -> _Shape:
        """The equal shape seen before, whose kernel is loaded, or this one."""
        known = self._known.setdefault(shape, shape)
        assert isinstance(known, type(shape))
        return known


def _count(own: Tensor, groups: int) -> Tensor:
    """[T * groups] int32 blocks that are seen by T tokens whose own blocks are [T] int64."""
    return (own + 1).int().repeat_interleave(groups)


def _reached(arena: Tensor | None) -> Tensor:
    """Memory that the GPU reaches itself; without it kernels cannot do these operations."""
    assert arena is not None, "a GPU maps the arena"
    return arena
