"""What models with latent records and an indexer of their own need of a device, beside StepKernels.

Two implementations: the twins (latent_twins.py), which are the definition, and the GPU's
(gpu/latent_kernels.py), which choose the same tokens in another order.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.decode_batch import DecodeBatch


class LatentKernels(Protocol):
    """Shapes as DecodeBatch names them, of one group and blocks of one token: R rows.

    Index keys are [device pages * page_tokens, index_dim]; all rows' lie among one another. Where records are
    attended to, coded ones are bytes.
    """

    def observe(self, batch: DecodeBatch, keys: Tensor, arena: Tensor | None, key: Tensor) -> None:
        """Write each row's new index key.

        Args:
            batch: the step's rows.
            keys: the layer's index keys.
            arena: [host pages * page_tokens, index_dim], its arena's; None where that is out of reach.
            key: [R, index_dim].
        """

    def choose(self, batch: DecodeBatch, keys: Tensor, index: IndexQuery, top_k: int) -> Tensor:
        """The best tokens for each row's newest, which is observed: [R, at most top_k] int32, -1 = none."""

    def rank(
        self, pages: Tensor, page_tokens: int, start: int, keys: Tensor, index: IndexQuery, top_k: int
    ) -> Tensor:
        """The best tokens for each of a run of one row's tokens; nowhere do all scores of a long row exist.

        Args:
            pages: [pages up to the run's end] int32, the row's device pages.
            page_tokens: tokens of a page.
            start: position of the run's first token; each token sees those up to itself.
            keys: the layer's index keys, the run's among them.
            index: of the run's T tokens.
            top_k: most tokens to choose.

        Returns:
            [T, min(top_k, start + T)] int32, -1 = none.
        """

    def code(self, record: Tensor, latent: int) -> Tensor:
        """record_code.py's: [T, latent + roped] to [T, coded bytes] uint8, the same bytes everywhere."""

    def attend(
        self,
        batch: DecodeBatch,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        selected: Tensor,
        scaling: float,
        latent: int,
    ) -> Tensor:
        """attend_latent.py's, of a step's rows: [R, heads, latent]."""

    def attend_half(
        self,
        batch: DecodeBatch,
        query: Tensor,
        pool: Tensor,
        slots: Tensor,
        half: Tensor,
        scaling: float,
        latent: int,
        *,
        joined: bool,
    ) -> Part:
        """`attend` over one half of a split; StepKernels says the rest."""

    def attend_chosen(
        self, query: Tensor, record: Tensor, chosen: Tensor, scaling: float, latent: int
    ) -> Part:
        """attend_chosen.py's; `out` is float32 or of the query's dtype."""
