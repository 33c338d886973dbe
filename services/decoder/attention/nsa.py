"""NSA: a coarse attention over compressed keys, whose weights say which blocks to read (arXiv 2502.11089).

An entry sums up `compress_tokens` keys and as many values of one KV head with learnt weights; it is seen from
the token on that completes it. A block's score is what its entries weigh in the softmax, summed over
the query heads of a KV head; the token's own block is always chosen. Entries never leave the device. Those of
an open block grow token by token, in the arena too, so that whoever takes the page over can go on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.decoder.attention.block_selector import BlockChoice, BlockInput
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.select import top_blocks
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.paged_index import Entries
from services.decoder.kv.shape import KvShape


class Nsa:
    """One layer's entries, `block_tokens / compress_tokens` a block, in the index of the block."""

    def __init__(self, entries: Entries, shape: KvShape, top_k: int, compress_tokens: int) -> None:
        """Stand on the layer's `entries` and choose `top_k` blocks a KV head at most."""
        entry = (-1, 2, shape.kv_heads, shape.head_dim)
        self._device = entries.device.view(entry)
        self._arena = None if entries.arena is None else entries.arena.view(entry)
        self._blocks_per_page = shape.blocks_per_page
        self._block_tokens = shape.block_tokens
        self._top_k = top_k
        self._tokens = compress_tokens
        self._each = shape.block_tokens // compress_tokens  # entries of a block

    def fill(self, chunk: PrefillChunk, found: BlockInput) -> None:
        """Entries of all the chunk's tokens; the last one may be a sum of its first ones only."""
        assert found.value is not None
        assert found.weight is not None
        sides = torch.stack([found.key, found.value], dim=1)  # [T, 2, kv_heads, head_dim]
        sides = pad(sides, (0, 0, 0, 0, 0, 0, 0, -sides.shape[0] % self._tokens))
        runs = sides.view(-1, self._tokens, *sides.shape[1:])
        made = torch.einsum("ntegd,egt->negd", runs, found.weight)
        places = chunk.index_blocks.unsqueeze(1) * self._each + torch.arange(self._each)
        self._device.index_copy_(0, places.flatten()[: made.shape[0]], made.to(self._device.dtype))

    def observe(self, batch: DecodeBatch, found: BlockInput) -> None:
        """Each row's token into the last entry of its open block, or the first one into a new one."""
        assert found.value is not None
        assert found.weight is not None
        offset = batch.position % self._block_tokens
        entry, inside = offset // self._tokens, offset % self._tokens
        weight = found.weight[:, :, inside].permute(2, 0, 1).unsqueeze(3)  # [rows, 2, kv_heads, 1]
        added = torch.stack([found.key, found.value], dim=1) * weight
        place = batch.index_block * self._each + entry
        before = self._device.index_select(0, place).masked_fill(inside.view(-1, 1, 1, 1) == 0, 0)
        now = (before + added).to(self._device.dtype)
        self._device.index_copy_(0, place, now)
        if self._arena is not None:  # else written with the whole step's, by PagedIndex
            self._arena.index_copy_(0, batch.host_index_block * self._each + entry, now)

    def select(self, batch: DecodeBatch, found: BlockInput) -> BlockChoice:
        """A row at a time, so that who decodes beside it changes nothing."""
        made = []
        for row, position in enumerate(batch.position.tolist()):
            at = torch.tensor([position])
            made.append(self._look(found.query[row : row + 1], at, batch.row_device_pages[row]))
        width = max(choice.blocks.shape[2] for choice in made)
        blocks = [pad(choice.blocks, (0, width - choice.blocks.shape[2]), value=-1) for choice in made]
        beside = [choice.beside for choice in made if choice.beside is not None]
        return BlockChoice(torch.cat(blocks), torch.cat(beside))

    def rank(self, chunk: PrefillChunk, found: BlockInput) -> BlockChoice:
        """All tokens of the chunk at once."""
        return self._look(found.query, torch.arange(chunk.start, chunk.end), chunk.device_pages.long())

    def _look(self, query: Tensor, position: Tensor, pages: Tensor) -> BlockChoice:
        """Of T queries at ascending `position`s of one row with `pages` [P] int64."""
        last = int(position[-1])
        block = torch.arange(last // self._block_tokens + 1)
        own = pages[block // self._blocks_per_page] * self._blocks_per_page + block % self._blocks_per_page
        places = (own.unsqueeze(1) * self._each + torch.arange(self._each)).flatten()
        key, value = self._device.index_select(0, places).float().transpose(0, 1)  # [n, kv_heads, head_dim]
        kv_heads, head_dim = key.shape[1:]
        heads = query.float().view(query.shape[0], kv_heads, -1, head_dim)
        scores = torch.einsum("tghd,ngd->tghn", heads, key) * head_dim**-0.5
        complete = (torch.arange(places.shape[0]) + 1) * self._tokens - 1  # token that completes each entry
        seen = (complete <= position.unsqueeze(1)).view(-1, 1, 1, places.shape[0])
        # Where nothing is seen yet, softmax over nothing is taken to be nothing.
        share = scores.masked_fill(~seen, float("-inf")).softmax(3).masked_fill(~seen, 0)
        # An entry that is not seen may hold another request's numbers: not even zero times those.
        safe = value.masked_fill(~seen.any(0).view(-1, 1, 1), 0)
        beside = torch.einsum("tghn,ngd->tghd", share, safe).flatten(1, 2).to(query.dtype)
        of_blocks = share.sum(2).view(*share.shape[:2], -1, self._each).sum(3)  # [T, kv_heads, blocks]
        chosen = top_blocks(of_blocks, position // self._block_tokens, self._top_k)
        return BlockChoice(chosen, beside)
