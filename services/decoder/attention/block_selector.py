"""What chooses blocks in models that bring a choice of their own, in prefill as well as in decode.

Knows what such a model hands over for its tokens. NSA (nsa.py) looks at queries, keys and values themselves,
MiniMax-M3 (block_index.py) at index queries and keys beside them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kv.batch import PrefillChunk


class BlockInput(NamedTuple):
    """What a selector is given of T tokens."""

    query: Tensor  # [T, heads, dim], after rope
    key: Tensor  # [T, heads, dim], after rope
    value: Tensor | None = None  # [T, heads, dim]
    weight: Tensor | None = None  # [2, kv_heads, tokens of an entry]: how keys and values are compressed

    def part(self, run: slice) -> BlockInput:
        """Of some of the tokens."""
        return self._replace(
            query=self.query[run],
            key=self.key[run],
            value=None if self.value is None else self.value[run],
        )


class BlockChoice(NamedTuple):
    """What T tokens chose."""

    blocks: Tensor  # [T, groups, top_k] int32, -1 = none; the token's own block always among them
    beside: Tensor | None = None  # [T, query heads, head_dim]: attention over the index itself, NSA's


class BlockSelector(Protocol):
    """One layer's choice."""

    def fill(self, chunk: PrefillChunk, found: BlockInput) -> None:
        """Take in a prefill chunk's tokens."""

    def observe(self, batch: DecodeBatch, found: BlockInput) -> None:
        """Take in a decode step's tokens, one a row, on the device and in the arena."""

    def select(self, batch: DecodeBatch, found: BlockInput) -> BlockChoice:
        """Choose for each row's newest token, which is observed."""

    def rank(self, chunk: PrefillChunk, found: BlockInput) -> BlockChoice:
        """Choose for each of a chunk's tokens, which are filled in; no token chooses a block behind it."""
