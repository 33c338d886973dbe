"""Quest: blocks whose keys' bounds promise the largest dot products (arXiv 2406.10774, section 3).

Knows block bounds and queries. `groups` says who shares a choice: each KV head for itself, or the layer.
"""

from __future__ import annotations

from torch import Tensor

from services.decoder.kernels.bounds import append_bounds, fill_bounds
from services.decoder.kernels.select import all_blocks, score_blocks, top_blocks
from services.decoder.kv.batch import DecodeBatch, PrefillChunk
from services.decoder.kv.shape import KvShape


class Quest:
    """One layer's bounds, paged on the device."""

    def __init__(self, shape: KvShape, bounds: Tensor, top_k: int) -> None:
        """Stand on `bounds`, `[device pages, bounds elements]`, and choose `top_k` blocks a lane."""
        self._shape = shape
        self._paged = bounds.view(-1, shape.blocks_per_page, shape.kv_heads, 2 * shape.head_dim)
        self._blocks = self._paged.view(-1, shape.kv_heads, 2 * shape.head_dim)
        self._top_k = top_k

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        """Bounds of every block that the chunk touches."""
        fill_bounds(self._blocks, key, chunk.bounds_blocks, self._shape.block_tokens)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        """The open block's bounds widen, or start afresh when it opens."""
        append_bounds(self._blocks, key, batch.bounds_block, batch.fresh)

    def select(self, batch: DecodeBatch, query: Tensor) -> Tensor:
        """Top-k by upper bound; everything where everything fits the budget."""
        groups = self._shape.groups
        if batch.most_blocks <= self._top_k:
            return all_blocks(batch.open_block, groups, batch.most_blocks)
        scores = score_blocks(self._paged, batch.device_pages, query, groups)
        return top_blocks(scores, batch.open_block, self._top_k)
