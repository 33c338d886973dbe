"""DSA: the model's own indexer chooses tokens by what it has learnt (DeepSeek-V3.2, GLM-5).

Knows index keys and index queries; the projections that make them are the model's. One choice a layer, in
blocks of one token. Unlike Quest it does not force the newest token: the indexer may leave it out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kernels.choose_tokens import IndexQuery, choose_tokens
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.paged_index import Entries


class Dsa:
    """One layer's index keys, paged on the device, one entry a token."""

    def __init__(self, keys: Entries, page_tokens: int, top_k: int) -> None:
        """Stand on the layer's `keys` and choose `top_k` tokens at most."""
        self._keys = keys
        self._page_tokens = page_tokens
        self._top_k = top_k

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        """Take in a prefill chunk's index keys, `[tokens, index_dim]`; they are saved with their pages."""
        self._keys.device.index_copy_(0, chunk.index_blocks, key)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        """Take in a decode step's index keys, `[rows, index_dim]`, on the device and in the arena."""
        self._keys.device.index_copy_(0, batch.index_block, key)
        if self._keys.arena is not None:
            self._keys.arena.index_copy_(0, batch.host_index_block, key)

    def select(self, batch: DecodeBatch, index: IndexQuery) -> Tensor:
        """The choice of each row's newest token, who is observed: `[rows, top_k]` int32 tokens, -1 = none."""
        width = min(self._top_k, batch.most_blocks)
        places = self._places(batch.row_device_pages)
        chosen = torch.full((places.shape[0], width), -1, dtype=torch.int32, device=places.device)
        for row, at in enumerate(batch.position.tolist()):
            one = IndexQuery(index.query[row : row + 1], index.weight[row : row + 1])
            found = choose_tokens(one, self._keys.device, places[row, : at + 1], at, self._top_k)
            chosen[row, : found.shape[1]] = found[0]
        return chosen

    def rank(self, chunk: PrefillChunk, index: IndexQuery) -> Tensor:
        """The choice of each of a chunk's tokens, which it has been filled with: `[tokens, top_k]` int32."""
        places = self._places(chunk.device_pages.long().unsqueeze(0))[0, : chunk.end]
        return choose_tokens(index, self._keys.device, places, chunk.start, self._top_k)

    def _places(self, pages: Tensor) -> Tensor:
        """[rows, P] int64 device pages -> [rows, P * page_tokens] int64 entries."""
        token = torch.arange(self._page_tokens, device=pages.device)
        return (pages.unsqueeze(2) * self._page_tokens + token).flatten(1)
