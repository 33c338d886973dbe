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
from services.decoder.kernels.attend_masked import Sight
from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.block_kernels import BlockKernels
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.step_kernels import Split, StepKernels
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.residence import Residence
from services.decoder.kv.shape import KvShape


class BlockHeart(Heart):
    """One residence; one selector a layer, of blocks where the model chooses."""

    def __init__(
        self,
        kernels: StepKernels,
        block_kernels: BlockKernels,
        shape: KvShape,
        residence: Residence,
        selectors: Sequence[Selector],
        choosing: Mapping[int, BlockSelector],
        window_tokens: int,
    ) -> None:
        """Layers in `choosing` choose blocks; with `window_tokens` they look at as many newest tokens too."""
        super().__init__(kernels, shape, residence, selectors)
        self._block_kernels = block_kernels
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
        wanted = selected
        if self._window:
            wanted = torch.cat([selected, self._window_blocks(batch, selected)], dim=1)
        placement = residence.resolve(layer, batch, wanted)
        residence.append(layer, batch, placement, key, value, None)
        pool, slots = residence.pool(layer), placement.slots
        chosen = slots[:, : selected.shape[1]].contiguous()
        if placement.split is None:
            branches = [self._kernels.attend(batch, query, pool, chosen, selected, scaling)]
        else:
            branches = [self._by_halves(layer, batch, query, chosen, selected, placement.split, scaling)]
        if choice.beside is not None:
            branches.append(choice.beside)
        if self._window:
            seen = (query, pool, slots, wanted, scaling, self._window)
            branches.append(self._block_kernels.attend_newest(batch, *seen))
        return tuple(branches)

    def _by_halves(
        self,
        layer: int,
        batch: DecodeBatch,
        query: Tensor,
        slots: Tensor,
        selected: Tensor,
        split: Split,
        scaling: float,
    ) -> Tensor:
        """Attention over the chosen blocks, hits first. The plan has the window's misses too, so both halves
        stand in the selection's places; the window itself is read when all is there.
        """
        pool, attend = self._residence.pool(layer), self._kernels.attend_half
        resident = split.hits[:, : selected.shape[1]].contiguous()
        hits = attend(batch, query, pool, slots, resident, scaling, joined=False)
        self._residence.arrive(layer)
        coming = selected.masked_fill(resident >= 0, -1)
        misses = attend(batch, query, pool, slots, coming, scaling, joined=True)
        return self._kernels.merge_parts(hits, misses, query.dtype).out

    def _window_blocks(self, batch: DecodeBatch, selected: Tensor) -> Tensor:
        """[lanes, W] int32: the window's blocks that are not chosen, -1 in the others' places."""
        block = self._newest_blocks(batch.lane_length)
        known = (block.unsqueeze(2) == selected.unsqueeze(1)).any(2)
        return block.masked_fill(known, -1)

    def _newest_blocks(self, length: Tensor) -> Tensor:
        """[n, W] int32: the blocks of the newest tokens of [n] int64 `length`, the last first; -1 pads."""
        size = self._shape.block_tokens
        width = -(-(self._window - 1) // size) + 1
        block = (length - 1).unsqueeze(1) // size - torch.arange(width, device=length.device)
        first = (length - self._window).clamp_min(0) // size
        return block.masked_fill(block < first.unsqueeze(1), -1).int()

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
        sights = [Sight(chunk.start, choice.blocks, size)]
        if self._window:
            length = torch.arange(chunk.start + 1, chunk.end + 1, device=query.device)
            newest = self._newest_blocks(length).unsqueeze(1)
            sights.append(Sight(chunk.start, newest, size, self._window))
        attend = self._block_kernels.attend_chosen
        earlier: list[Part] = []
        at = 0
        for window in residence.history(layer, chunk):
            found_there = [attend(query, window.key, window.value, at, sight, scaling) for sight in sights]
            earlier = self._merged(earlier, found_there, torch.float32)
            at += window.key.shape[0]
        own = [attend(query, key, value, chunk.start, sight, scaling) for sight in sights]
        branches = [part.out.to(query.dtype) for part in self._merged(earlier, own, query.dtype)]
        if choice.beside is not None:
            branches.insert(1, choice.beside)
        return tuple(branches)

    def _merged(self, earlier: Sequence[Part], later: Sequence[Part], dtype: torch.dtype) -> list[Part]:
        """Each branch's two parts as one; `later` alone where there is nothing earlier."""
        if not earlier:
            return list(later)
        return [self._kernels.merge_parts(*both, dtype) for both in zip(earlier, later, strict=True)]
