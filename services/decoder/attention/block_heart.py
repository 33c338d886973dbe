"""The heart of models that choose blocks by themselves, in prefill too (NSA, MiniMax-M3).

The five lines of heart.py around a BlockSelector. Layers without one are dense and heart.py's. A sliding
window is a second reading of the same records: its blocks are resolved in every step, so they are never
victims and stay. Knows a layer's number and its queries, keys and values; how branches are weighed is the
model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.decoder.attention.block_selector import BlockInput, BlockSelector
from services.decoder.attention.heart import Heart
from services.decoder.attention.selector import Selector
from services.decoder.kernels.attend import attend_slots
from services.decoder.kernels.attend_half import attend_half
from services.decoder.kernels.attend_masked import attend_masked, blocks_seen
from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.residence import Residence
from services.decoder.kv.shape import KvShape


class BlockHeart(Heart):
    """One residence; one selector a layer, of blocks where the model chooses."""

    def __init__(
        self,
        kernels: StepKernels,
        shape: KvShape,
        residence: Residence,
        selectors: Sequence[Selector],
        choosing: Mapping[int, BlockSelector],
        window_tokens: int,
    ) -> None:
        """Layers in `choosing` choose blocks; with `window_tokens` they look at as many newest tokens too."""
        super().__init__(kernels, shape, residence, selectors)
        self._choosing = dict(choosing)
        self._window = window_tokens

    def decode_blocks(
        self,
        layer: int,
        batch: DecodeBatch,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        found: BlockInput,
        scaling: float,
    ) -> tuple[Tensor, ...]:
        """One new token a row, in a layer that chooses.

        Args:
            layer: which layer.
            batch: the step's rows.
            query: [rows, query heads, head_dim], after rope.
            key: [rows, kv_heads, head_dim], after rope.
            value: [rows, kv_heads, head_dim].
            found: what the selector is given.
            scaling: factor on q.k.

        Returns:
            by branch, [rows, query heads, head_dim]: the chosen blocks, then what lies beside the choice and
            the window, if the model has them.
        """
        selector, residence = self._choosing[layer], self._residence

        selector.observe(batch, found)
        choice = selector.select(batch, found)
        selected = choice.blocks.flatten(0, 1)  # [lanes, top_k]
        wanted = torch.cat([selected, self._window_blocks(batch, selected)], dim=1)
        placement = residence.resolve(layer, batch, wanted)
        residence.append(layer, batch, placement, key, value, None)
        pool, slots, length = residence.pool(layer), placement.slots, batch.lane_length
        # Each branch: how many of the wanted places, and from which token on.
        reads: list[tuple[int, Tensor | None]] = [(selected.shape[1], None)]
        if self._window:
            reads.append((wanted.shape[1], length - self._window))

        def over(blocks: Tensor) -> list[Part]:
            return [
                attend_half(query, pool, slots[:, :width], blocks[:, :width], length, scaling, first)
                for width, first in reads
            ]

        if placement.split is None:
            branches = [
                attend_slots(
                    query, pool, slots[:, :width].contiguous(), wanted[:, :width], length, scaling, first
                )
                for width, first in reads
            ]
        else:
            hits = placement.split.hits
            early = over(hits)
            residence.arrive(layer)
            merged = self._merged(early, over(wanted.masked_fill(hits >= 0, -1)), query.dtype)
            branches = [part.out for part in merged]
        if choice.beside is not None:
            branches.insert(1, choice.beside)
        return tuple(branches)

    def _window_blocks(self, batch: DecodeBatch, selected: Tensor) -> Tensor:
        """[lanes, W] int32: the window's blocks that are not chosen, -1 in the others' places."""
        size = self._shape.block_tokens
        width = -(-(self._window - 1) // size) + 1 if self._window else 0
        block = batch.lane_open_block.unsqueeze(1) - torch.arange(width)
        first = (batch.lane_length - self._window).clamp_min(0) // size
        known = (block.unsqueeze(2) == selected.unsqueeze(1)).any(2)
        return block.masked_fill(known | (block < first.unsqueeze(1)), -1).int()

    def prefill_blocks(
        self,
        layer: int,
        chunk: PrefillChunk,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        found: BlockInput,
        scaling: float,
    ) -> tuple[Tensor, ...]:
        """A run of one row's prompt, each token over the blocks that it chose; as `decode_blocks`."""
        selector, residence = self._choosing[layer], self._residence
        selector.fill(chunk, found)
        choice = selector.rank(chunk, found)
        residence.write(layer, chunk, key, value)
        size = self._shape.block_tokens
        seen = blocks_seen(choice.blocks, -(-chunk.end // size)).repeat_interleave(size, 2)
        token, position = torch.arange(chunk.end), torch.arange(chunk.start, chunk.end).unsqueeze(1)
        past = token <= position  # [T, tokens up to the end]
        masks = [seen[..., : chunk.end] & past.unsqueeze(1)]
        if self._window:
            masks.append((past & (token > position - self._window)).unsqueeze(1))
        earlier: list[Part] = []
        at = 0
        for window in residence.history(layer, chunk):
            run = slice(at, at + window.key.shape[0])
            found_there = [
                attend_masked(query, window.key, window.value, mask[..., run], scaling) for mask in masks
            ]
            earlier = self._merged(earlier, found_there, torch.float32)
            at = run.stop
        own = [attend_masked(query, key, value, mask[..., chunk.start :], scaling) for mask in masks]
        branches = [part.out.to(query.dtype) for part in self._merged(earlier, own, query.dtype)]
        if choice.beside is not None:
            branches.insert(1, choice.beside)
        return tuple(branches)

    def _merged(self, earlier: Sequence[Part], later: Sequence[Part], dtype: torch.dtype) -> list[Part]:
        """Each branch's two parts as one; `later` alone where there is nothing earlier."""
        if not earlier:
            return list(later)
        return [self._kernels.merge_parts(*both, dtype) for both in zip(earlier, later, strict=True)]
