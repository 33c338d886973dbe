"""Selectors that note what they choose: put before a layer's own when an operator asks for it.

Knows decode rows and selections. On a GPU each note waits for the device and reads its ids back.
"""

from __future__ import annotations

from torch import Tensor

from services.decoder.attention.block_selector import BlockChoice, BlockInput, BlockSelector
from services.decoder.attention.selection_file import SelectionWriter
from services.decoder.attention.selector import Selector, TokenSelector
from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kv.batch import PrefillChunk


class Recorded:
    """A Selector and its notes."""

    def __init__(self, selector: Selector, layer: int, writer: SelectionWriter) -> None:
        self._selector, self._layer, self._writer = selector, layer, writer
        self.bounds = selector.bounds

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        """The selector's."""
        self._selector.fill(chunk, key)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        """The selector's."""
        self._selector.observe(batch, key)

    def select(self, batch: DecodeBatch, query: Tensor) -> Tensor:
        """The selector's choice, noted."""
        selected = self._selector.select(batch, query)
        note(self._writer, self._layer, batch, selected)
        return selected


class RecordedTokens:
    """A TokenSelector and its notes; prefill's choices are not noted."""

    def __init__(self, selector: TokenSelector, layer: int, writer: SelectionWriter) -> None:
        self._selector, self._layer, self._writer = selector, layer, writer

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        """The selector's."""
        self._selector.fill(chunk, key)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        """The selector's."""
        self._selector.observe(batch, key)

    def select(self, batch: DecodeBatch, index: IndexQuery) -> Tensor:
        """The selector's choice, noted."""
        selected = self._selector.select(batch, index)
        note(self._writer, self._layer, batch, selected)
        return selected

    def rank(self, chunk: PrefillChunk, index: IndexQuery) -> Tensor:
        """The selector's."""
        return self._selector.rank(chunk, index)


class RecordedBlocks:
    """A BlockSelector and its notes; prefill's choices are not noted."""

    def __init__(self, selector: BlockSelector, layer: int, writer: SelectionWriter) -> None:
        self._selector, self._layer, self._writer = selector, layer, writer

    def fill(self, chunk: PrefillChunk, found: BlockInput) -> None:
        """The selector's."""
        self._selector.fill(chunk, found)

    def observe(self, batch: DecodeBatch, found: BlockInput) -> None:
        """The selector's."""
        self._selector.observe(batch, found)

    def select(self, batch: DecodeBatch, found: BlockInput) -> BlockChoice:
        """The selector's choice, noted."""
        choice = self._selector.select(batch, found)
        note(self._writer, self._layer, batch, choice.blocks.flatten(0, 1))
        return choice

    def rank(self, chunk: PrefillChunk, found: BlockInput) -> BlockChoice:
        """The selector's."""
        return self._selector.rank(chunk, found)


def note(writer: SelectionWriter, layer: int, batch: DecodeBatch, selected: Tensor) -> None:
    """Write a layer's choice, `[lanes, top_k]` int32, of the real rows."""
    rows = int(batch.real_rows)
    if rows:
        blocks = selected.view(batch.seats.shape[0], batch.groups, -1)[:rows].cpu().numpy()
        seats, positions = batch.seats[:rows].long().cpu().numpy(), batch.position[:rows].cpu().numpy()
        writer.write(layer, seats, positions, blocks)
