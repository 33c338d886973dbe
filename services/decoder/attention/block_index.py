"""MiniMax-M3's choice: blocks by their best token, scored by index keys that all heads share.

One index head a KV head. A block's score is the largest dot product of the index query with its index keys;
the token's own block is always chosen. Index keys never leave the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.decoder.attention.block_selector import BlockChoice, BlockInput
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.select import top_blocks
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.paged_index import Entries
from services.decoder.kv.shape import KvShape

_BLOCKS_AT_ONCE = 16
"""Blocks whose tokens' scores are held at once."""


class BlockIndex:
    """One layer's index keys, one a token, in the index of the token's block."""

    def __init__(self, entries: Entries, shape: KvShape, top_k: int) -> None:
        """Stand on the layer's `entries` and choose `top_k` blocks a KV head at most."""
        self._block_tokens = shape.block_tokens
        key = (-1, shape.index_dim // shape.block_tokens)
        self._device = entries.device.view(key)
        self._arena = None if entries.arena is None else entries.arena.view(key)
        self._blocks_per_page = shape.blocks_per_page
        self._top_k = top_k

    def fill(self, chunk: PrefillChunk, found: BlockInput) -> None:
        """Keys of the chunk's tokens; they are saved with their pages."""
        places = chunk.index_blocks.unsqueeze(1) * self._block_tokens + torch.arange(self._block_tokens)
        self._device.index_copy_(0, places.flatten()[: found.key.shape[0]], found.key.squeeze(1))

    def observe(self, batch: DecodeBatch, found: BlockInput) -> None:
        """Each row's key, on the device and in the arena."""
        offset = batch.position % self._block_tokens
        key = found.key.squeeze(1)
        self._device.index_copy_(0, batch.index_block * self._block_tokens + offset, key)
        if self._arena is not None:  # else written with the whole step's, by PagedIndex
            self._arena.index_copy_(0, batch.host_index_block * self._block_tokens + offset, key)

    def select(self, batch: DecodeBatch, found: BlockInput) -> BlockChoice:
        """A row at a time, so that who decodes beside it changes nothing."""
        made = [
            self._look(found.query[row : row + 1], torch.tensor([position]), batch.row_device_pages[row])
            for row, position in enumerate(batch.position.tolist())
        ]
        width = max(blocks.shape[2] for blocks in made)
        return BlockChoice(torch.cat([pad(one, (0, width - one.shape[2]), value=-1) for one in made]))

    def rank(self, chunk: PrefillChunk, found: BlockInput) -> BlockChoice:
        """All tokens of the chunk at once."""
        position = torch.arange(chunk.start, chunk.end)
        return BlockChoice(self._look(found.query, position, chunk.device_pages.long()))

    def _look(self, query: Tensor, position: Tensor, pages: Tensor) -> Tensor:
        """[T, heads, top_k] int32 of T queries at ascending `position`s of one row with `pages` [P] int64."""
        blocks = int(position[-1]) // self._block_tokens + 1
        parts = []
        for first in range(0, blocks, _BLOCKS_AT_ONCE):
            block = torch.arange(first, min(first + _BLOCKS_AT_ONCE, blocks))
            own = (
                pages[block // self._blocks_per_page] * self._blocks_per_page + block % self._blocks_per_page
            )
            places = (own.unsqueeze(1) * self._block_tokens + torch.arange(self._block_tokens)).flatten()
            scores = torch.einsum("thd,nd->thn", query.float(), self._device.index_select(0, places).float())
            token = first * self._block_tokens + torch.arange(places.shape[0])
            scores.masked_fill_((token > position.unsqueeze(1)).unsqueeze(1), float("-inf"))
            parts.append(scores.view(*scores.shape[:2], -1, self._block_tokens).amax(3))
        return top_blocks(torch.cat(parts, 2), position // self._block_tokens, self._top_k)
