"""What a step does to KV, layer by layer, whatever the device: the decode rows', and prefill's at the end.

Two implementations: the twins (twins.py), which are the definition and run anywhere, and the GPU's
(gpu/step_kernels.py), which agree with them slot for slot. Which one an engine uses is settled once, when it
is put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.bounds import BlockBounds
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.lru import LaneTables


@dataclass(frozen=True, slots=True)
class LayerStore:
    """What one layer of a hot buffer brings to resolve."""

    tables: LaneTables
    pool: Tensor  # [pool slots, block elements]
    # [host blocks, block elements], in the order of docs/records.md; None: kernels cannot reach it
    arena: Tensor | None
    counters: Tensor  # [len(Counter)] int64


@dataclass(frozen=True, slots=True)
class MissPlan:
    """What a step of resolve fetched, lane by lane, in the order of the selection; good for every layer."""

    source: Tensor  # [lanes, top_k] int32 blocks of a layer's arena region
    target: Tensor  # [lanes, top_k] int32 pool slots
    count: Tensor  # [lanes] int32; the columns from there on mean nothing


class Split(NamedTuple):
    """A selection in two halves."""

    hits: Tensor  # [L, top_k] int32, the selection with -1 for what is fetched; the open block is not
    misses: Tensor  # [L, top_k] int32 blocks, each once, in the sequence of the plan's targets; -1 pads


class Placement(NamedTuple):
    """Where a step's blocks lie in a layer's pool."""

    slots: Tensor  # [L, top_k] int32, -1 where nothing was selected
    open_slot: Tensor  # [L] int32
    plan: MissPlan | None = None  # what was fetched for it, where other layers will follow
    split: Split | None = None  # where the fetches are left to others


class StepKernels(Protocol):
    """Shapes as DecodeBatch names them: R rows, L = R * groups lanes."""

    def select(self, batch: DecodeBatch, bounds: Tensor, query: Tensor, top_k: int) -> Tensor:
        """Quest's choice.

        Args:
            batch: the step's rows.
            bounds: [device pages, blocks a page, kv_heads, 2 * head_dim], as bounds.py keeps them.
            query: [R, query heads, head_dim].
            top_k: most blocks a lane.

        Returns:
            [L, at most top_k] int32 blocks, the open one always among them, -1 pads.
        """

    def resolve(
        self,
        batch: DecodeBatch,
        layer: LayerStore,
        selected: Tensor,
        *,
        followed: bool = False,
        later: bool = False,
    ) -> Placement:
        """Make every selected block readable in the layer's pool, as DESIGN section 4 says.

        Args:
            batch: the step's rows.
            layer: tables and bytes.
            selected: [L, top_k] int32 blocks, -1 = none.
            followed: write the placement's plan, too; where there is no arena, the plan is all that is done
                for what misses, and whoever called brings the bytes.
            later: fetch nothing, and wait for nothing; the placement has its plan, which whoever called
                replays, and its split. What the plan names is counted as fetched.
        """

    def replay(self, layer: LayerStore, plan: MissPlan, *, ahead: bool = False) -> None:
        """Fetch into a layer that shares the tables what the plan's resolve fetched into its own.

        Args:
            layer: the one that shares.
            plan: of its anchor's resolve in this step.
            ahead: beside other work and not in the layer's turn, so nobody is taken to wait for it.
        """

    def locate(self, batch: DecodeBatch, selected: Tensor, counters: Tensor) -> Placement:
        """Where device-resident blocks lie: `resolve` for a pool that holds everything.

        Args:
            batch: the step's rows.
            selected: [L, top_k] int32 blocks, -1 = none.
            counters: [len(Counter)] int64; everything chosen counts as a hit.
        """

    def append(
        self,
        batch: DecodeBatch,
        open_slot: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        arena: Tensor | None,
        bounds: BlockBounds | None,
    ) -> None:
        """Write each row's new record to its open slot and, through, to the arena; widen the block's bounds.

        Bounds of a block that this token fills are written through too. Without an arena nothing is.

        Args:
            batch: the step's rows.
            open_slot: [L] int32 blocks of `pool`.
            key: [R, kv_heads, head_dim], after rope.
            value: [R, kv_heads, head_dim].
            pool: [pool slots, block elements].
            arena: [host blocks, block elements], or None.
            bounds: the layer's, or None where none are kept.
        """

    def attend(
        self, batch: DecodeBatch, query: Tensor, pool: Tensor, slots: Tensor, selected: Tensor, scaling: float
    ) -> Tensor:
        """One query a row over the blocks in `slots`, masked to the row's length.

        Args:
            batch: the step's rows.
            query: [R, query heads, head_dim].
            pool: [pool slots, block_tokens, 2, heads of a group, head_dim].
            slots: [L, top_k] int32, -1 = none.
            selected: [L, top_k] int32, the blocks in those slots, -1 = none.
            scaling: factor on q.k.

        Returns:
            [R, query heads, head_dim].
        """

    def attend_half(
        self,
        batch: DecodeBatch,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        half: Tensor,
        scaling: float,
        *,
        joined: bool,
    ) -> Part:
        """`attend` over one half of a split, as a part that merges with the other half's.

        Args:
            batch: the step's rows.
            query: [R, query heads, head_dim].
            pool: as `attend`'s.
            slots: [L, top_k] int32, the placement's for hits, its plan's targets for misses.
            half: [L, top_k] int32, the half's blocks in those slots, -1 = none; a lane may have none at all.
            scaling: factor on q.k.
            joined: work of another stream was joined just before.
        """

    def fill_bounds(self, bounds: Tensor, key: Tensor, block: Tensor, block_tokens: int) -> None:
        """Set the bounds of the blocks that a prompt's run touches; bounds.py says the shapes."""

    def write_run(self, key: Tensor, value: Tensor, target: Tensor, pages: Tensor, first: int) -> None:
        """Write a prompt's run as records into pages; write_run.py says the shapes."""

    def gather_pages(self, source: Tensor, pages: Tensor, out: Tensor) -> None:
        """Records of some pages in token order, for prefill.

        Args:
            source: [all pages, groups, page_tokens, record elements].
            pages: [n] int32, in token order.
            out: [groups, n * page_tokens, record elements], contiguous; written.
        """

    def load_pages(self, sources: Sequence[Tensor], targets: Sequence[Tensor], pages: Tensor) -> None:
        """Bring pages of the arena into the pools of all layers, beside whatever else runs.

        Args:
            sources: of each layer, [host pages, page elements].
            targets: of each layer, [device pages, page elements]; written.
            pages: [2, n] int64, n > 0: of the sources, and where in the targets.
        """

    def merge_parts(self, first: Part, second: Part, dtype: torch.dtype) -> Part:
        """Prefill's attention over two parts as one, its `out` in `dtype`."""
