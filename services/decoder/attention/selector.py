"""What chooses the blocks that a decode step reads.

Knows nothing of slots: a selector speaks of logical blocks only.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kv.batch import PrefillChunk


class Selector(Protocol):
    """One layer's choice. Its index lives in device pages that the scheduler owns."""

    @property
    def bounds(self) -> BlockBounds | None:
        """Block bounds that append keeps up to date.

        The open block is chosen without looking at its bounds, so its newest key may come after the choice.
        """

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        """Take in a prefill chunk's keys, `[tokens, kv_heads, head_dim]`."""

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        """Take in a decode step's keys, `[rows, kv_heads, head_dim]`, where the choice depends on them."""

    def select(self, batch: DecodeBatch, query: Tensor) -> Tensor:
        """Choose for `[rows, query heads, head_dim]`: `[rows * groups, top_k]` int32 blocks, -1 = none.

        The open block is always chosen. Ties break to the lowest block.
        """
