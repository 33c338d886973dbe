"""The heart of models that keep one latent record a token (MLA) and choose by an indexer of their own (DSA).

The five lines of heart.py, with two differences: prefill is sparse too, and a layer may follow another one's
choice instead of making one. Knows a layer's number, its absorbed queries and its records; the projections
around them are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.attention.halves import attend_halves
from services.decoder.attention.selector import TokenSelector
from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.latent_kernels import LatentKernels
from services.decoder.kernels.step_kernels import Placement, StepKernels
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.residence import Residence
from services.decoder.kv.shape import KvShape


class IndexInput(NamedTuple):
    """What a layer's indexer makes of T tokens."""

    key: Tensor  # [T, index_dim], after rope
    query: IndexQuery

    def part(self, run: slice) -> IndexInput:
        """Of some of the tokens."""
        return IndexInput(self.key[run], IndexQuery(self.query.query[run], self.query.weight[run]))


class DecodeChoice(NamedTuple):
    """What a layer chose for decode rows, and where it lies: the layers that follow it need both."""

    selected: Tensor  # [rows, top_k] int32 tokens, -1 = none
    placement: Placement


class LatentHeart:
    """One residence, one selector a layer that chooses."""

    def __init__(
        self,
        kernels: StepKernels,
        latent_kernels: LatentKernels,
        shape: KvShape,
        residence: Residence,
        selectors: Mapping[int, TokenSelector],
    ) -> None:
        """Layers without an entry in `selectors` follow the choice of one before them."""
        self._kernels = kernels
        self._latent_kernels = latent_kernels
        self._shape = shape
        self._residence = residence
        self._selectors = dict(selectors)

    def decode(
        self,
        layer: int,
        batch: DecodeBatch,
        query: Tensor,
        record: Tensor,
        index: IndexInput | DecodeChoice,
        scaling: float,
    ) -> tuple[Tensor, DecodeChoice]:
        """One new token a row.

        Args:
            layer: which layer.
            batch: the step's rows.
            query: [rows, heads, latent + roped], absorbed, after rope.
            record: [rows, latent + roped], after rope.
            index: what the indexer made of the tokens, or the choice to follow.
            scaling: factor on q.k.

        Returns:
            [rows, heads, latent], and the choice.
        """
        residence = self._residence
        if isinstance(index, IndexInput):
            selector = self._selectors[layer]
            selector.observe(batch, index.key)
            selected = selector.select(batch, index.query)
            placement = residence.resolve(layer, batch, selected)
        else:
            selected = index.selected
            placement = residence.follow(layer, batch, selected, index.placement)
        residence.append(layer, batch, placement, *_sides(self._kept(record)), None)
        pool, latent = residence.pool(layer), self._shape.latent
        attending = self._latent_kernels
        if placement.split is None:
            out = attending.attend(batch, query, pool, placement.slots, selected, scaling, latent)
            return out, DecodeChoice(selected, placement)

        def half(slots: Tensor, blocks: Tensor, joined: bool) -> Part:
            return attending.attend_half(batch, query, pool, slots, blocks, scaling, latent, joined=joined)

        out = attend_halves(self._kernels, residence, layer, placement, half, query.dtype)
        return out, DecodeChoice(selected, placement)

    def prefill(
        self,
        layer: int,
        chunk: PrefillChunk,
        query: Tensor,
        record: Tensor,
        index: IndexInput | Tensor,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        """A run of one row's prompt, each token over those that it chose.

        Args:
            layer: which layer.
            chunk: the run.
            query: [tokens, heads, latent + roped], absorbed, after rope.
            record: [tokens, latent + roped], after rope.
            index: what the indexer made of the tokens, or the choice to follow.
            scaling: factor on q.k.

        Returns:
            [tokens, heads, latent], and the choice: [tokens, top_k] int32 tokens, -1 = none.
        """
        residence, latent = self._residence, self._shape.latent
        attend_chosen = self._latent_kernels.attend_chosen
        if isinstance(index, IndexInput):
            selector = self._selectors[layer]
            selector.fill(chunk, index.key)
            selected = selector.rank(chunk, index.query)
        else:
            selected = index
        kept = self._kept(record)
        residence.write(layer, chunk, *_sides(kept))
        earlier: Part | None = None
        at = 0
        for window in residence.history(layer, chunk):
            part = attend_chosen(query, window.key.squeeze(1), selected - at, scaling, latent)
            earlier = part if earlier is None else self._kernels.merge_parts(earlier, part, torch.float32)
            at += window.key.shape[0]
        own = attend_chosen(query, kept, selected - chunk.start, scaling, latent)
        if earlier is None:
            return own.out.to(query.dtype), selected
        return self._kernels.merge_parts(earlier, own, query.dtype).out, selected

    def _kept(self, record: Tensor) -> Tensor:
        """Records as they are kept and, from here on, attended to, in the step that makes them too."""
        return self._latent_kernels.code(record, self._shape.latent) if self._shape.record_coded else record


def _sides(record: Tensor) -> tuple[Tensor, Tensor]:
    """Records as a residence takes them: one head's keys, and values that have no numbers of their own."""
    key = record.unsqueeze(1)
    return key, key[..., :0]
