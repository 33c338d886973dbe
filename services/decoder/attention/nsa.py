"""NSA: a coarse attention over compressed keys, whose weights say which blocks to read (arXiv 2502.11089).

An entry sums up `compress_tokens` keys and as many values of one KV head with learnt weights; it is seen from
the token on that completes it. A block's score is what its entries weigh in the softmax, summed over
the query heads of a KV head; the token's own block is always chosen. Entries never leave the device. Those of
an open block grow token by token, in the arena too, so that whoever takes the page over can go on.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from services.decoder.attention.block_selector import BlockChoice, BlockInput
from services.decoder.kernels.attend_entries import attend_entries
from services.decoder.kernels.block_kernels import BlockKernels
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.places import blocks_of
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.paged_index import Entries
from services.decoder.kv.shape import KvShape

_SCORES_AT_ONCE = 2**23
"""Scores of a chunk's queries, heads and entries that are held at once: 32 MiB."""


class Nsa:
    """One layer's entries, `block_tokens / compress_tokens` a block, in the index of the block."""

    def __init__(
        self, kernels: BlockKernels, entries: Entries, shape: KvShape, top_k: int, compress_tokens: int
    ) -> None:
        """Stand on the layer's `entries` and choose `top_k` blocks a KV head at most."""
        self._kernels = kernels
        self._each = shape.block_tokens // compress_tokens  # entries of a block
        entry = (-1, shape.blocks_per_page, self._each, 2, shape.kv_heads, shape.head_dim)
        self._device = entries.device.view(entry)
        self._arena = None if entries.arena is None else entries.arena.view(entry)
        self._block_tokens = shape.block_tokens
        self._top_k = top_k
        self._tokens = compress_tokens

    def fill(self, chunk: PrefillChunk, found: BlockInput) -> None:
        """Entries of all the chunk's tokens; the last one may be a sum of its first ones only."""
        assert found.value is not None
        assert found.weight is not None
        sides = torch.stack([found.key, found.value], dim=1)  # [T, 2, kv_heads, head_dim]
        sides = pad(sides, (0, 0, 0, 0, 0, 0, 0, -sides.shape[0] % self._tokens))
        runs = sides.view(-1, self._tokens, *sides.shape[1:])
        made = torch.einsum("ntegd,egt->negd", runs, found.weight)
        entry = torch.arange(self._each, device=made.device)
        places = (chunk.index_blocks.unsqueeze(1) * self._each + entry).flatten()
        self._device.flatten(0, 2).index_copy_(0, places[: made.shape[0]], made.to(self._device.dtype))

    def observe(self, batch: DecodeBatch, found: BlockInput) -> None:
        """Each row's token into the last entry of its open block, or the first one into a new one."""
        assert found.value is not None
        assert found.weight is not None
        inside = batch.position % self._tokens
        weight = found.weight[:, :, inside].permute(2, 0, 1).unsqueeze(3)  # [rows, 2, kv_heads, 1]
        added = torch.stack([found.key, found.value], dim=1) * weight
        self._kernels.add(batch, self._device, self._arena, added)

    def select(self, batch: DecodeBatch, found: BlockInput) -> BlockChoice:
        """One look at the entries yields the choice and what lies beside it."""
        look = self._kernels.look(batch, self._device, found.query)
        return BlockChoice(self._kernels.best(look.scores, batch.open_block, self._top_k), look.out)

    def rank(self, chunk: PrefillChunk, found: BlockInput) -> BlockChoice:
        """As many of the chunk's tokens at once as there is room for scores."""
        position = torch.arange(chunk.start, chunk.end, device=self._device.device)
        pages = chunk.device_pages.unsqueeze(0)
        places = blocks_of(pages, 1, self._device.shape[1])[0, 0, : -(-chunk.end // self._block_tokens)]
        entries = self._device.flatten(0, 1).index_select(0, places).flatten(0, 1).unsqueeze(0)
        step = max(1, _SCORES_AT_ONCE // (found.query.shape[1] * entries.shape[1]))
        beside, chosen = [], []
        for first in range(0, position.shape[0], step):
            query, at = found.query[first : first + step], position[first : first + step]
            out, scores = attend_entries(
                query.unsqueeze(0), at.unsqueeze(0), entries, self._tokens, self._each
            )
            beside.append(out[0])
            chosen.append(self._kernels.best(scores[0], at // self._block_tokens, self._top_k))
        return BlockChoice(torch.cat(chosen), torch.cat(beside))
