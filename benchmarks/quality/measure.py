"""Runs the variants: perplexity of decoded tokens, and how many needles are found.

Knows sizes and sums; what the figures mean for a default is table.py's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.quality.needles import DEPTHS, Haystack, haystack
from benchmarks.quality.prefilled import BLOCK_TOKENS, Prefilled
from benchmarks.quality.variant import ALL, DENSE, Variant
from benchmarks.real_text import real_tokens
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec

STRIDE = 18_000  # tokens of the text from one segment's begin to the next
LONGEST_QUESTION = 80  # tokens, with its answer


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    contexts: tuple[int, ...] = (2048, 4096, 7168)  # tokens before the first decoded one
    segments: int = 6
    targets: int = 56  # tokens decoded a segment and context
    haystacks: tuple[int, ...] = (2048, 4096, 5632, 7168)  # tokens
    seeds: int = 3  # haystacks a length
    variants: tuple[Variant, ...] = ALL


QUICK = Sizes((512,), 2, 8, (512,), 1, (DENSE, Variant(256, "kv_head"), Variant(256, "layer")))
FLOAT32_CHECK = Sizes(contexts=(2048,), variants=(DENSE, Variant(512, "kv_head")))
"""One point again in float32."""


class Measurement:
    """One model in one dtype."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._path = path
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._model = CausalLM(ModelSpec.read(path), dtype, torch.device("cpu"))

    def losses(self, sizes: Sizes) -> dict[Variant, dict[int, list[list[float]]]]:
        """By variant and context, by segment: minus the log probabilities of the text's own next tokens."""
        longest = max(sizes.contexts)
        more = BLOCK_TOKENS + sizes.targets + 2
        texts = [
            real_tokens(self._tokenizer, longest + sizes.targets + 1, skip=STRIDE * i)
            for i in range(sizes.segments)
        ]
        prefilled = Prefilled(self._path, self._model, [t[: longest - BLOCK_TOKENS] for t in texts], more)
        found: dict[Variant, dict[int, list[list[float]]]] = {variant: {} for variant in sizes.variants}
        for context in sorted(sizes.contexts, reverse=True):
            kept = context - BLOCK_TOKENS
            prompts = [text[kept:context] for text in texts]
            known = [text[context : context + sizes.targets + 1] for text in texts]
            for variant in sizes.variants:
                rows = prefilled.answer(variant, prompts, known, sizes.targets + 1, kept)
                # The first token comes from prefill, which is dense for everyone.
                found[variant][context] = [[-(token.logprob or 0.0) for token in row[1:]] for row in rows]
                print(f"  {variant.name}: context {context}", flush=True)
        return found

    def recall(self, sizes: Sizes) -> dict[Variant, dict[int, int]]:
        """By variant and length: numbers found, digit for digit, of `seeds` x `DEPTHS` asked for."""
        found: dict[Variant, dict[int, int]] = {variant: {} for variant in sizes.variants}
        for length in sizes.haystacks:
            stacks = [haystack(self._path, self._tokenizer, length, seed) for seed in range(sizes.seeds)]
            prefilled = Prefilled(
                self._path, self._model, [stack.prefix for stack in stacks], LONGEST_QUESTION
            )
            for variant in sizes.variants:
                found[variant][length] = sum(
                    _found(prefilled, variant, stacks, number) for number in range(len(DEPTHS))
                )
                print(f"  {variant.name}: {found[variant][length]} found in {length}", flush=True)
        return found


def _found(prefilled: Prefilled, variant: Variant, stacks: list[Haystack], number: int) -> int:
    """Right answers to the `number`-th question of each haystack."""
    questions = [stack.questions[number] for stack in stacks]
    (given,) = {len(question.opening) for question in questions}
    (digits,) = {len(question.number) for question in questions}
    answers = prefilled.answer(
        variant,
        [question.prompt for question in questions],
        [question.opening for question in questions],
        given + digits,
    )
    return sum(
        [token.token for token in answer[given:]] == question.number
        for answer, question in zip(answers, questions, strict=True)
    )


def summary(
    losses: Mapping[Variant, Mapping[int, list[list[float]]]], recall: Mapping[Variant, Mapping[int, int]]
) -> list[dict[str, Any]]:
    """One entry a variant, ready for JSON; contexts and lengths are its keys, in tokens.

    `excess` is the mean loss (nats a token) over dense, `excess_error` its standard error over segments
    and contexts, which are compared one by one because they differ far more than the variants do.
    """
    entries = []
    for variant, by_context in losses.items():
        contexts = sorted(by_context)
        means = [statistics.fmean(row) for context in contexts for row in by_context[context]]
        dense = [statistics.fmean(row) for context in contexts for row in losses[DENSE][context]]
        excess = [mine - base for mine, base in zip(means, dense, strict=True)]
        entries.append(
            {
                "name": variant.name,
                **asdict(variant),
                "loss": {
                    str(context): statistics.fmean(x for row in by_context[context] for x in row)
                    for context in contexts
                },
                "excess": statistics.fmean(excess),
                "excess_error": statistics.stdev(excess) / len(excess) ** 0.5,
                "found": {str(length): count for length, count in recall.get(variant, {}).items()},
            }
        )
    return entries
