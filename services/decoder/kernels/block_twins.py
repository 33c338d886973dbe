"""The twins behind BlockKernels: plain torch; the definition of every operation.

Knows nothing of padding rows: a twin's batch has none. Rows are looked at one by one, so that who decodes
beside a row changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.decoder.kernels.attend import attend_slots
from services.decoder.kernels.attend_entries import attend_entries
from services.decoder.kernels.attend_masked import Sight, attend_masked
from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.block_kernels import Look
from services.decoder.kernels.choose_blocks import score_by_best_token
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.places import blocks_of
from services.decoder.kernels.select import top_blocks


class BlockTwins:
    """Implements BlockKernels."""

    def observe(self, batch: DecodeBatch, keys: Tensor, arena: Tensor | None, key: Tensor) -> None:
        """Both sides, where both are in reach."""
        offset = batch.position % batch.block_tokens
        for side, block in _sides(batch, keys, arena):
            side.flatten(0, 2).index_copy_(0, block * batch.block_tokens + offset, key)

    def choose(self, batch: DecodeBatch, keys: Tensor, query: Tensor, top_k: int) -> Tensor:
        """kernels/choose_blocks.py; best first."""
        made = [
            self.rank(pages, position, keys, query[row : row + 1], top_k)
            for row, (pages, position) in enumerate(
                zip(batch.row_device_pages, batch.position.tolist(), strict=True)
            )
        ]
        width = max(blocks.shape[2] for blocks in made)
        return torch.cat([pad(blocks, (0, width - blocks.shape[2]), value=-1) for blocks in made])

    def rank(self, pages: Tensor, start: int, keys: Tensor, query: Tensor, top_k: int) -> Tensor:
        """kernels/choose_blocks.py; best first."""
        block_tokens, last = keys.shape[2], start + query.shape[0] - 1
        places = blocks_of(pages.unsqueeze(0), 1, keys.shape[1])[0, 0, : last // block_tokens + 1]
        position = torch.arange(start, last + 1, device=keys.device)
        scores = score_by_best_token(query, position, keys.flatten(0, 1), places)
        return top_blocks(scores, position // block_tokens, top_k)

    def add(self, batch: DecodeBatch, entries: Tensor, arena: Tensor | None, added: Tensor) -> None:
        """On the device, and what it comes to in the arena."""
        each = entries.shape[2]
        tokens = batch.block_tokens // each
        entry, inside = batch.position % batch.block_tokens // tokens, batch.position % tokens
        device = entries.flatten(0, 2)
        before = device.index_select(0, batch.index_block * each + entry)
        now = before.masked_fill(inside.view(-1, 1, 1, 1) == 0, 0) + added
        for side, block in _sides(batch, entries, arena):
            side.flatten(0, 2).index_copy_(0, block * each + entry, now.to(entries.dtype))

    def look(self, batch: DecodeBatch, entries: Tensor, query: Tensor) -> Look:
        """kernels/attend_entries.py, of the entries up to a row's own block."""
        each = entries.shape[2]
        outs, scores = [], []
        for row, position in enumerate(batch.position.tolist()):
            pages = batch.row_device_pages[row : row + 1]
            places = blocks_of(pages, 1, entries.shape[1])[0, 0, : position // batch.block_tokens + 1]
            own = entries.flatten(0, 1).index_select(0, places).flatten(0, 1)
            at = torch.tensor([[position]], device=query.device)
            found = attend_entries(
                query[row].view(1, 1, *query.shape[1:]),
                at,
                own.unsqueeze(0),
                batch.block_tokens // each,
                each,
            )
            outs.append(found[0][0])
            scores.append(found[1][0])
        width = max(of_blocks.shape[2] for of_blocks in scores)
        return Look(torch.cat(outs), torch.cat([pad(one, (0, width - one.shape[2])) for one in scores]))

    def best(self, scores: Tensor, own: Tensor, top_k: int) -> Tensor:
        """kernels/select.py; best first."""
        return top_blocks(scores, own, top_k)

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
        """kernels/attend.py, from a first token on."""
        length = batch.lane_length
        return attend_slots(query, pool, slots, selected, length, scaling, length - window)

    def attend_chosen(
        self, query: Tensor, key: Tensor, value: Tensor, first: int, sight: Sight, scaling: float
    ) -> Part:
        """kernels/attend_masked.py."""
        return attend_masked(query, key, value, sight.mask(first, key.shape[0]), scaling)


def _sides(batch: DecodeBatch, device: Tensor, arena: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Where a block's part of an index lies, with each row's open block there: [R] int64."""
    sides = [(device, batch.index_block)]
    if arena is not None:  # else written with the whole step's, by PagedIndex
        sides.append((arena, batch.host_index_block))
    return sides
