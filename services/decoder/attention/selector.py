"""What chooses the blocks that a decode step reads.

Knows nothing of slots: a selector speaks of logical blocks only.

Two kinds: of models whose selector is ours to choose, by the keys that attention reads anyway, and of models
whose own indexer brings keys and queries of its own.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.choose_tokens import IndexQuery
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


class TokenSelector(Protocol):
    """One layer's choice of single tokens, in prefill too."""

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        """Take in a prefill chunk's index keys, `[tokens, index_dim]`."""

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        """Take in a decode step's index keys, `[rows, index_dim]`."""

    def select(self, batch: DecodeBatch, index: IndexQuery) -> Tensor:
        """Choose for each row's newest token, which is observed: `[rows, top_k]` int32 tokens, -1 = none."""

    def rank(self, chunk: PrefillChunk, index: IndexQuery) -> Tensor:
        """Choose for each of a chunk's tokens, which are filled in: `[tokens, top_k]` int32, -1 = none.

        No token chooses one behind it. Each chooses at least one.
        """
