"""MiniMax-M3's choice: blocks by their best token, scored by index keys that all heads share.

One index head a KV head. A block's score is the largest dot product of the index query with its index keys;
the token's own block is always chosen. Index keys never leave the device.
"""

from __future__ import annotations

import torch

from services.decoder.attention.block_selector import BlockChoice, BlockInput
from services.decoder.kernels.block_kernels import BlockKernels
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.paged_index import Entries
from services.decoder.kv.shape import KvShape


class BlockIndex:
    """One layer's index keys, one a token, in the index of the token's block."""

    def __init__(self, kernels: BlockKernels, entries: Entries, shape: KvShape, top_k: int) -> None:
        """Stand on the layer's `entries` and choose `top_k` blocks a KV head at most."""
        self._kernels = kernels
        self._block_tokens = shape.block_tokens
        key = (-1, shape.blocks_per_page, shape.block_tokens, shape.index_dim // shape.block_tokens)
        self._device = entries.device.view(key)
        self._arena = None if entries.arena is None else entries.arena.view(key)
        self._top_k = top_k

    def fill(self, chunk: PrefillChunk, found: BlockInput) -> None:
        """Keys of the chunk's tokens; they are saved with their pages."""
        token = torch.arange(self._block_tokens, device=self._device.device)
        places = (chunk.index_blocks.unsqueeze(1) * self._block_tokens + token).flatten()
        keys = self._device.flatten(0, 2)
        keys.index_copy_(0, places[: found.key.shape[0]], found.key.squeeze(1))

    def observe(self, batch: DecodeBatch, found: BlockInput) -> None:
        """Each row's key, on the device and in the arena."""
        self._kernels.observe(batch, self._device, self._arena, found.key.squeeze(1))

    def select(self, batch: DecodeBatch, found: BlockInput) -> BlockChoice:
        """By the keys of all the row's full blocks."""
        return BlockChoice(self._kernels.choose(batch, self._device, found.query, self._top_k))

    def rank(self, chunk: PrefillChunk, found: BlockInput) -> BlockChoice:
        """All tokens of the chunk at once."""
        found_blocks = self._kernels.rank(
            chunk.device_pages, chunk.start, self._device, found.query, self._top_k
        )
        return BlockChoice(found_blocks)
