"""What the heart asks of the place where KV lies; `tiered` and `full` answer it.

Knows no selector and no attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.step_kernels import Placement
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.history import KeysValues
from services.decoder.kv.hot_class import Resize
from services.decoder.kv.miss_curve import MissCurve


class SlotCount(NamedTuple):
    """Hot slots of all layers together."""

    total: int
    used: int


class Residence(Protocol):
    """Holds the KV of all rows. Calls come from the engine's loop alone."""

    counters: Tensor  # [layers, len(Counter)] int64, since start
    curve: MissCurve | None  # of sampled choices; None where none are

    def seat(self, row: int, tokens: int) -> None:
        """Make `row` ready to decode after its prefill of `tokens` tokens; its tables are filled in."""

    def load(self, pages: Sequence[tuple[int, int]]) -> None:
        """Make pages of the arena, given as (host page, device page), readable as history."""

    def leave(self, row: int) -> None:
        """Forget `row`; a row that was never seated is ignored."""

    def resize(self, resizes: Sequence[Resize]) -> None:
        """Let rows own other parcels of the hot buffer, between steps; those that lose some come first.

        A row gets its first parcels before it is seated.
        """

    def resolve(self, layer: int, batch: DecodeBatch, selected: Tensor) -> Placement:
        """Make every selected block (`[lanes, top_k]` int32) readable in the layer's pool.

        Where the placement has a split, its misses are readable behind `arrive`.
        """

    def follow(self, layer: int, batch: DecodeBatch, selected: Tensor, anchor: Placement) -> Placement:
        """`resolve` in a layer that follows another one's choice, which was placed there in the same step."""

    def arrive(self, layer: int) -> None:
        """What is computed from now on comes behind every fetch of `layer` in this step.

        Whoever got a placement with a split calls it, once, before the misses are read.
        """

    def append(
        self,
        layer: int,
        batch: DecodeBatch,
        placement: Placement,
        key: Tensor,
        value: Tensor,
        bounds: BlockBounds | None,
    ) -> None:
        """Write a token a row to the open slots, to the arena and into the selector's bounds, if it has any.

        Shapes: `key` and `value` [rows, kv_heads, head_dim]; of a latent record `value` is [rows, 1, 0], and
        so it is in `write`.
        """

    def pool(self, layer: int) -> Tensor:
        """What placements point into, in the shape of KvShape.as_blocks."""

    def begin(self, chunks: Sequence[PrefillChunk]) -> None:
        """A step with these chunks begins: `write` and `history` follow, by layer and in this order."""

    def write(self, layer: int, chunk: PrefillChunk, key: Tensor, value: Tensor) -> None:
        """Write a prefill chunk's records from its `[tokens, kv_heads, head_dim]` keys and values."""

    def history(self, layer: int, chunk: PrefillChunk) -> Iterator[KeysValues]:
        """What came before the chunk, window by window; each is there until the next one is asked for."""

    def finish(self) -> None:
        """The layers of the step's chunks are done."""

    def settle(self) -> None:
        """The step has computed all it will: what it wrote is in the arena, and others may read it.

        Of a GPU: once the step is done there. Before that no page of the step is sealed, and no row seated.
        """

    def abandon(self) -> None:
        """The step has failed: what it wrote and has not settled must not reach the arena any more."""

    def hot_slots(self) -> SlotCount:
        """Hot slots there are, and how many lanes own."""

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is lost or owned twice, or tables disagree."""
