"""The heart: observe, select, resolve, append, attend - the same for every model and every selector.

Knows a layer's number and its queries, keys and values. Where KV lies is the residence's affair, what is
read the selector's, what the model does around it the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.decoder.attention.halves import attend_halves
from services.decoder.attention.selector import Selector
from services.decoder.kernels.attend_part import Part, attend_part
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.residence import Residence
from services.decoder.kv.shape import KvShape


class Heart:
    """One residence, one selector a layer."""

    def __init__(
        self, kernels: StepKernels, shape: KvShape, residence: Residence, selectors: Sequence[Selector]
    ) -> None:
        self._kernels = kernels
        self._shape = shape
        self._residence = residence
        self._selectors = tuple(selectors)

    def decode(
        self, layer: int, batch: DecodeBatch, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """One new token a row.

        Args:
            layer: which layer.
            batch: the step's rows.
            query: [rows, query heads, head_dim], after rope.
            key: [rows, kv_heads, head_dim], after rope.
            value: [rows, kv_heads, head_dim].
            scaling: factor on q.k.

        Returns:
            [rows, query heads, head_dim].
        """
        selector, residence = self._selectors[layer], self._residence

        selector.observe(batch, key)
        selected = selector.select(batch, query)
        placement = residence.resolve(layer, batch, selected)
        residence.append(layer, batch, placement, key, value, selector.bounds)
        pool = residence.pool(layer)
        if placement.split is None:
            return self._kernels.attend(batch, query, pool, placement.slots, selected, scaling)

        def half(slots: Tensor, blocks: Tensor, joined: bool) -> Part:
            return self._kernels.attend_half(batch, query, pool, slots, blocks, scaling, joined=joined)

        return attend_halves(self._kernels, residence, layer, placement, half, query.dtype)

    def prefill(
        self, layer: int, chunk: PrefillChunk, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """A run of one row's prompt, densely.

        Args:
            layer: which layer.
            chunk: the run.
            query: [tokens, query heads, head_dim], after rope.
            key: [tokens, kv_heads, head_dim], after rope.
            value: [tokens, kv_heads, head_dim].
            scaling: factor on q.k.

        Returns:
            [tokens, query heads, head_dim].
        """
        selector, residence = self._selectors[layer], self._residence
        selector.fill(chunk, key)
        residence.write(layer, chunk, key, value)
        earlier: Part | None = None
        for window in residence.history(layer, chunk):
            part = attend_part(query, window.key, window.value, scaling, causal=False)
            earlier = part if earlier is None else self._kernels.merge_parts(earlier, part, torch.float32)
        own = attend_part(query, key, value, scaling, causal=True)
        return own.out if earlier is None else self._kernels.merge_parts(earlier, own, query.dtype).out
