"""One step of a model with latent records, as it is handed from layer to layer.

Packed as step.py says. What a layer chose goes from it to the layers that follow it through the model, so
nothing of a step is kept here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.attention.block_heart import BlockHeart
from services.decoder.attention.block_step import BlockStep
from services.decoder.attention.heart import Heart
from services.decoder.attention.latent_heart import DecodeChoice, IndexInput, LatentHeart
from services.decoder.attention.step import Step
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kv.batch import PrefillChunk


class Choice(NamedTuple):
    """What one layer chose in a step."""

    decode: DecodeChoice | None
    chunks: tuple[Tensor, ...]  # each [tokens, top_k] int32, -1 = none


@dataclass(frozen=True, slots=True)
class LatentStep:
    """Travels through the model as a keyword argument; nothing of it is global."""

    heart: LatentHeart
    decode: DecodeBatch | None
    chunks: tuple[PrefillChunk, ...]

    def attend(
        self, layer: int, query: Tensor, record: Tensor, index: IndexInput | Choice, scaling: float
    ) -> tuple[Tensor, Choice]:
        """Attention of all rows in one layer.

        Args:
            layer: which layer.
            query: [tokens, heads, latent + roped], absorbed, after rope, packed.
            record: [tokens, latent + roped], after rope, packed.
            index: what the layer's indexer made of the tokens, or what an earlier layer chose.
            scaling: factor on q.k.

        Returns:
            [tokens, heads, latent], and what was chosen.
        """
        outs: list[Tensor] = []
        decoded: DecodeChoice | None = None
        chosen: list[Tensor] = []
        at = 0
        if self.decode is not None:
            at = self.decode.seats.shape[0]
            rows = index.part(slice(at)) if isinstance(index, IndexInput) else index.decode
            assert rows is not None, "the same rows decode in every layer"
            out, decoded = self.heart.decode(layer, self.decode, query[:at], record[:at], rows, scaling)
            outs.append(out)
        for number, chunk in enumerate(self.chunks):
            run = slice(at, at + chunk.end - chunk.start)
            own = index.part(run) if isinstance(index, IndexInput) else index.chunks[number]
            out, choice = self.heart.prefill(layer, chunk, query[run], record[run], own, scaling)
            outs.append(out)
            chosen.append(choice)
            at = run.stop
        return outs[0] if len(outs) == 1 else torch.cat(outs), Choice(decoded, tuple(chosen))


def step_over(
    heart: Heart | LatentHeart, decode: DecodeBatch | None, chunks: tuple[PrefillChunk, ...]
) -> Step | LatentStep:
    """A step of the kind that a heart serves."""
    if isinstance(heart, LatentHeart):
        return LatentStep(heart, decode, chunks)
    if isinstance(heart, BlockHeart):
        return BlockStep(heart, decode, chunks)
    return Step(heart, decode, chunks)
