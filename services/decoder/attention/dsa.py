"""DSA: the model's own indexer chooses tokens by what it has learnt (DeepSeek-V3.2, GLM-5).

Knows index keys and index queries; the projections that make them are the model's. One choice a layer, in
blocks of one token. Unlike Quest it does not force the newest token: the indexer may leave it out.
"""

from __future__ import annotations

from torch import Tensor

from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.index_code import code_keys, code_query
from services.decoder.kernels.latent_kernels import LatentKernels
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.paged_index import Entries


class Dsa:
    """One layer's index keys, paged on the device, one entry a token."""

    def __init__(
        self,
        kernels: LatentKernels,
        keys: Entries,
        page_tokens: int,
        top_k: int,
        rotation: Tensor | None = None,
    ) -> None:
        """Stand on the layer's `keys` and choose `top_k` tokens at most.

        `rotation` [index_dim, index_dim] float32 is given where keys are kept in eight bits (index_code.py).
        """
        self._kernels = kernels
        self._rotation = rotation
        self._keys = keys
        self._page_tokens = page_tokens
        self._top_k = top_k

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        """Take in a prefill chunk's index keys, `[tokens, index_dim]`; they are saved with their pages."""
        self._keys.device.index_copy_(0, chunk.index_blocks, self._kept(key))

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        """Take in a decode step's index keys, `[rows, index_dim]`, on the device and in the arena."""
        self._kernels.observe(batch, *self._keys, self._kept(key))

    def select(self, batch: DecodeBatch, index: IndexQuery) -> Tensor:
        """The choice of each row's newest token, who is observed: `[rows, top_k]` int32 tokens, -1 = none."""
        return self._kernels.choose(batch, self._keys.device, self._asked(index), self._top_k)

    def rank(self, chunk: PrefillChunk, index: IndexQuery) -> Tensor:
        """The choice of each of a chunk's tokens, which it has been filled with: `[tokens, top_k]` int32."""
        pages, keys, asked = chunk.device_pages, self._keys.device, self._asked(index)
        return self._kernels.rank(pages, self._page_tokens, chunk.start, keys, asked, self._top_k)

    def _kept(self, key: Tensor) -> Tensor:
        return key if self._rotation is None else code_keys(key, self._rotation)

    def _asked(self, index: IndexQuery) -> IndexQuery:
        return index if self._rotation is None else IndexQuery(*code_query(*index, self._rotation))
