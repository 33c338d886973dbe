"""Quest: blocks whose keys' bounds promise the largest dot products (arXiv 2406.10774, section 3).

Knows block bounds and queries. `groups` says who shares a choice: each KV head for itself, or the layer.
"""

from __future__ import annotations

from torch import Tensor

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.shape import KvShape


class Quest:
    """One layer's bounds, paged on the device."""

    def __init__(self, kernels: StepKernels, shape: KvShape, bounds: BlockBounds, top_k: int) -> None:
        """Stand on the layer's `bounds` and choose `top_k` blocks a lane."""
        self._kernels = kernels
        self._block_tokens = shape.block_tokens
        self._top_k = top_k
        self.bounds = bounds

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        """Bounds of every block that the chunk touches."""
        bounds = self.bounds.device.flatten(0, 1)
        self._kernels.fill_bounds(bounds, key, chunk.index_blocks, self._block_tokens)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        """Nothing yet: append takes the key into the open block's bounds."""

    def select(self, batch: DecodeBatch, query: Tensor) -> Tensor:
        """Top-k by upper bound; everything where everything fits the budget."""
        return self._kernels.select(batch, self.bounds.device, query, self._top_k)
