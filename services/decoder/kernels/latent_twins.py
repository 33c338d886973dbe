"""The twins behind LatentKernels: plain torch; the definition of every operation.

Knows nothing of padding rows: a twin's batch has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kernels.attend_chosen import attend_chosen
from services.decoder.kernels.attend_half import attend_latent_half
from services.decoder.kernels.attend_latent import attend_latent
from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.choose_tokens import IndexQuery, choose_tokens
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.record_code import code_records


class LatentTwins:
    """Implements LatentKernels."""

    def observe(self, batch: DecodeBatch, keys: Tensor, arena: Tensor | None, key: Tensor) -> None:
        """Both sides, where both are in reach."""
        keys.index_copy_(0, batch.index_block, key)
        if arena is not None:
            arena.index_copy_(0, batch.host_index_block, key)

    def choose(self, batch: DecodeBatch, keys: Tensor, index: IndexQuery, top_k: int) -> Tensor:
        """kernels/choose_tokens.py, row by row; best first."""
        width = min(top_k, batch.most_blocks)
        places = _places(batch.row_device_pages, batch.blocks_per_page)
        chosen = torch.full((places.shape[0], width), -1, dtype=torch.int32, device=places.device)
        for row, at in enumerate(batch.position.tolist()):
            one = IndexQuery(index.query[row : row + 1], index.weight[row : row + 1])
            found = choose_tokens(one, keys, places[row, : at + 1], at, top_k)
            chosen[row, : found.shape[1]] = found[0]
        return chosen

    def rank(
        self, pages: Tensor, page_tokens: int, start: int, keys: Tensor, index: IndexQuery, top_k: int
    ) -> Tensor:
        """kernels/choose_tokens.py; best first."""
        places = _places(pages.long().unsqueeze(0), page_tokens)[0, : start + index.weight.shape[0]]
        return choose_tokens(index, keys, places, start, top_k)

    def code(self, record: Tensor, latent: int) -> Tensor:
        """kernels/record_code.py."""
        return code_records(record, latent)

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
        """kernels/attend_latent.py."""
        return attend_latent(query, pool, slots, selected, batch.lane_length, scaling, latent)

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
        """kernels/attend_half.py."""
        return attend_latent_half(query, pool, slots, half, batch.lane_length, scaling, latent)

    def attend_chosen(
        self, query: Tensor, record: Tensor, chosen: Tensor, scaling: float, latent: int
    ) -> Part:
        """kernels/attend_chosen.py."""
        return attend_chosen(query, record, chosen, scaling, latent)


def _places(pages: Tensor, page_tokens: int) -> Tensor:
    """[rows, P] int64 device pages -> [rows, P * page_tokens] int64 entries."""
    token = torch.arange(page_tokens, device=pages.device)
    return (pages.unsqueeze(2) * page_tokens + token).flatten(1)
