"""Traces of real text: the bundled model decodes long contexts, and the recorder notes what it reads.

    python -m benchmarks.real_trace OUT [--contexts 2000,4000,6500] [--steps 400] [--top-k 512]

What is chosen is the exact top-k by attention: of each KV head the tokens with the greatest share of its
query heads' softmax, the newest always among them. Answers are forced to follow the text, because greedy
answers of a small model loop; with `--sampled`, a row of the longest context is drawn freely beside them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.real_text import real_tokens
from services.decoder.attention.selector import Selector
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.select import top_blocks
from services.decoder.kv.batch import PrefillChunk
from services.decoder.models.bundled.directory import default_model
from services.decoder.settings import DecoderSettings

ARENA_BYTES = 4 * 2**30


class ExactAttention:
    """A selector over Quest's index where blocks are single tokens: their bounds are their keys."""

    def __init__(self, selector: Selector, top_k: int) -> None:
        assert selector.bounds is not None, "every layer must keep bounds"
        self._selector, self._top_k = selector, top_k
        self.bounds = selector.bounds
        self._newest: Tensor | None = None

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        self._selector.fill(chunk, key)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        self._newest = key

    def select(self, batch: DecodeBatch, query: Tensor) -> Tensor:
        rows, _, head_dim = query.shape
        assert self._newest is not None
        keys = self.bounds.device.flatten(0, 1)[..., :head_dim]  # [all tokens, kv_heads, head_dim]
        kv_heads = keys.shape[1]
        shares = torch.full((rows, kv_heads, batch.most_blocks), float("-inf"))
        for row, length in enumerate(batch.length.tolist()):
            pages = batch.row_device_pages[row]
            token = torch.arange(length - 1)
            place = (
                pages[token // batch.blocks_per_page] * batch.blocks_per_page + token % batch.blocks_per_page
            )
            own = torch.cat([keys[place], self._newest[row : row + 1]])  # [length, kv_heads, head_dim]
            heads = query[row].view(kv_heads, -1, head_dim)
            products = torch.einsum("ghd,tgd->ght", heads, own) * head_dim**-0.5
            shares[row, :, :length] = products.float().softmax(2).sum(1)
        return top_blocks(shares, batch.open_block, self._top_k).flatten(0, 1)


def record(
    out: Path, model: Path, contexts: list[int], steps: int, top_k: int, *, sampled: bool, threads: int
) -> None:
    """Write `out`: a row a context, in their order, then the free one."""
    torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    asked = []
    for row, context in enumerate(contexts):
        tokens = real_tokens(tokenizer, context + steps + 1, skip=9000 * row)
        prompt, answer = tokens[:context], tokens[context:]
        asked.append(Sequence(str(row), 0, prompt, Sampling(), 0, steps + 1, known=answer))
    if sampled:
        prompt = real_tokens(tokenizer, contexts[-1], skip=9000 * len(contexts))
        asked.append(Sequence("free", 0, prompt, Sampling(temperature=0.8, top_p=0.95), 0, steps + 1))
    longest = max(contexts) + steps + 64
    settings = DecoderSettings.model_validate(
        {
            "model": model,
            "device": "cpu",
            "dtype": "float32",
            "kv_mode": "full",
            "block_tokens": 1,
            "budget_tokens": top_k,
            "max_rows": len(asked),
            "max_model_len": longest,
            "max_step_tokens": 1024,
            "record_selections": out,
        }
    )
    engine = OfflineEngine(settings, ARENA_BYTES, wrap=lambda layer, own: ExactAttention(own, top_k))
    engine.generate(asked)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--contexts", default="2000,4000,6500")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--top-k", type=int, default=512)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    contexts = [int(context) for context in asked.contexts.split(",")]
    model = asked.model or default_model()
    record(asked.out, model, contexts, asked.steps, asked.top_k, sampled=asked.sampled, threads=asked.threads)


if __name__ == "__main__":
    main()
