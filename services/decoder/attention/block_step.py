"""One step of a model that chooses blocks by itself, as it is handed from layer to layer.

Packed as step.py says; dense layers of such a model call what step.py offers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.attention.block_heart import BlockHeart
from services.decoder.attention.block_selector import BlockInput
from services.decoder.attention.step import Step


@dataclass(frozen=True, slots=True)
class BlockStep(Step):
    """Travels through the model as a keyword argument; nothing of it is global."""

    heart: BlockHeart

    def attend_blocks(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, found: BlockInput, scaling: float
    ) -> tuple[Tensor, ...]:
        """Attention of all rows in a layer that chooses.

        Args:
            layer: which layer.
            query: [tokens, query heads, head_dim], after rope, packed.
            key: [tokens, kv_heads, head_dim], after rope, packed.
            value: the same shape as `key`.
            found: what the layer's selector is given, packed.
            scaling: factor on q.k.

        Returns:
            by branch, [tokens, query heads, head_dim], in the order of BlockHeart.
        """
        parts: list[tuple[Tensor, ...]] = []
        at = 0
        if self.decode is not None:
            at = self.decode.seats.shape[0]
            run = slice(at)
            own = (query[run], key[run], value[run], found.part(run))
            parts.append(self.heart.decode_blocks(layer, self.decode, *own, scaling))
        for chunk in self.chunks:
            run = slice(at, at + chunk.end - chunk.start)
            own = (query[run], key[run], value[run], found.part(run))
            parts.append(self.heart.prefill_blocks(layer, chunk, *own, scaling))
            at = run.stop
        return (
            parts[0] if len(parts) == 1 else tuple(torch.cat(branch) for branch in zip(*parts, strict=True))
        )
