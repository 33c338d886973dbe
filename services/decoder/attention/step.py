"""One step, as it is handed from layer to layer: who decodes, who prefills, and the heart that serves both.

Knows how rows are packed into one `[1, tokens]` batch: decode rows first, then the chunks in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.attention.heart import Heart
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kv.batch import PrefillChunk


@dataclass(frozen=True, slots=True)
class Step:
    """Travels through the model as a keyword argument; nothing of it is global."""

    heart: Heart
    decode: DecodeBatch | None
    chunks: tuple[PrefillChunk, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attention of all rows in one layer.

        Args:
            layer: which layer.
            query: [tokens, query heads, head_dim], after rope, packed.
            key: [tokens, kv_heads, head_dim], after rope, packed.
            value: the same shape as `key`.
            scaling: factor on q.k.

        Returns:
            [tokens, query heads, head_dim].
        """
        parts = []
        at = 0
        if self.decode is not None:
            at = self.decode.seats.shape[0]
            parts.append(self.heart.decode(layer, self.decode, query[:at], key[:at], value[:at], scaling))
        for chunk in self.chunks:
            run = slice(at, at + chunk.end - chunk.start)
            parts.append(self.heart.prefill(layer, chunk, query[run], key[run], value[run], scaling))
            at = run.stop
        return parts[0] if len(parts) == 1 else torch.cat(parts)
