"""What models that choose blocks by themselves need of a device, beside StepKernels.

Two implementations: the twins (block_twins.py), which are the definition, and the GPU's
(gpu/block_kernels.py), which choose the same blocks in another order. MiniMax-M3's are observe, choose and
rank; NSA's add, look, best and attend_newest.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from services.decoder.kernels.attend_masked import Sight
from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.decode_batch import DecodeBatch


class Look(NamedTuple):
    """What R rows' newest tokens see in their entries."""

    out: Tensor  # [R, query heads, head_dim]: attention over them; zeros where none is complete
    scores: Tensor  # [R, kv_heads, blocks] float32, not negative: what each block weighs in it


class BlockKernels(Protocol):
    """Shapes as DecodeBatch names them, of one group a KV head: R rows.

    Index keys are [device pages, blocks a page, block_tokens, dim], entries [device pages, blocks a page,
    entries of a block, 2, kv_heads, head_dim]; those of all rows lie among one another.
    """

    def observe(self, batch: DecodeBatch, keys: Tensor, arena: Tensor | None, key: Tensor) -> None:
        """Write each row's new index key.

        Args:
            batch: the step's rows.
            keys: the layer's index keys.
            arena: the same by host page, in the arena; None where that is out of reach.
            key: [R, dim].
        """

    def choose(self, batch: DecodeBatch, keys: Tensor, query: Tensor, top_k: int) -> Tensor:
        """The best blocks for each row's newest token, by their best token; its own is always among them.

        Args:
            batch: the step's rows, whose keys are observed.
            keys: the layer's index keys.
            query: [R, groups, dim].
            top_k: most blocks of a group.

        Returns:
            [R, groups, at most top_k] int32, -1 = none.
        """

    def rank(self, pages: Tensor, start: int, keys: Tensor, query: Tensor, top_k: int) -> Tensor:
        """`choose` for a run of one row's tokens.

        Args:
            pages: [pages up to the run's end] int32, the row's device pages.
            start: position of the run's first token; each token sees those up to itself.
            keys: the layer's index keys, the run's among them.
            query: [T, groups, dim].
            top_k: most blocks of a group.

        Returns:
            [T, groups, at most top_k] int32, -1 = none.
        """

    def add(self, batch: DecodeBatch, entries: Tensor, arena: Tensor | None, added: Tensor) -> None:
        """Add each row's new token to the entry that it is part of; the first token begins it afresh.

        Args:
            batch: the step's rows.
            entries: the layer's.
            arena: the same by host page, in the arena; None where that is out of reach.
            added: [R, 2, kv_heads, head_dim] its key and value, weighted.
        """

    def look(self, batch: DecodeBatch, entries: Tensor, query: Tensor) -> Look:
        """attend_entries.py's, of each row's newest token: `query` is [R, query heads, head_dim]."""

    def best(self, scores: Tensor, own: Tensor, top_k: int) -> Tensor:
        """The best of scored blocks, a token's own always among them; ties go to the lowest.

        Args:
            scores: [T, groups, blocks] float32, not negative; what lies past a token's own block is ignored.
            own: [T] int64 blocks.
            top_k: most blocks of a group.

        Returns:
            [T, groups, at most top_k] int32, -1 = none.
        """

    def attend_newest(
        self,
        batch: DecodeBatch,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        selected: Tensor,
        scaling: float,
        window: int,
    ) -> Tensor:
        """StepKernels.attend, of each row's `window` newest tokens alone; `selected` has all their blocks."""

    def attend_chosen(
        self, query: Tensor, key: Tensor, value: Tensor, first: int, sight: Sight, scaling: float
    ) -> Part:
        """Prefill's attention over a part of what its tokens may see.

        Args:
            query: [T, query heads, head_dim], after rope.
            key: [n, kv_heads, head_dim] of n consecutive tokens of the row.
            value: the same shape.
            first: position of the first of them, which begins a block.
            sight: of the T tokens; those n that it does not hide end with a block, or with the T.
            scaling: factor on q.k.

        Returns:
            a Part whose `out` is float32 or of the query's dtype; zeros where a token sees nothing.
        """
