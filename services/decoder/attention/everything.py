"""Dense attention as a selector: every block, every step. For exempt layers, and to compare with.

Keeps no index.
"""

from __future__ import annotations

from torch import Tensor

from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.select import all_blocks
from services.decoder.kv.batch import PrefillChunk


class Everything:
    """Chooses all blocks in order."""

    bounds = None

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        """Nothing to remember."""

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        """Nothing to remember."""

    def select(self, batch: DecodeBatch, query: Tensor) -> Tensor:
        """All blocks of each row."""
        return all_blocks(batch.open_block, batch.groups, batch.most_blocks).flatten(0, 1).contiguous()
