"""An engine whose rows are prefilled once and then go on many times, under one variant after another.

Knows that a rewind to a block's edge leaves no trace: whatever lies behind it, records and bounds, is written
afresh before it is read. A test compares the outcome with engines that are made for one variant each.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import replace
from pathlib import Path

from benchmarks.quality.variant import Variant
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import SampledToken, Sampling, Sequence
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings

BLOCK_TOKENS = 16
PAGE_TOKENS = 64
STEP_TOKENS = 2048
ARENA_BYTES = 4 * 2**30  # address room; a tmpfs gives memory only for what is written


class Prefilled:
    """One row a prefix."""

    def __init__(self, path: Path, model: CausalLM, prefixes: ListOf[list[int]], more_tokens: int) -> None:
        """Prefill, densely.

        Args:
            path: the checkpoint.
            model: the same, loaded.
            prefixes: token ids, each a whole number of blocks.
            more_tokens: most tokens, prompt and answer, that a run will add to a row.
        """
        if any(len(prefix) % BLOCK_TOKENS for prefix in prefixes):
            raise ValueError(f"prefixes must be multiples of {BLOCK_TOKENS} tokens")
        # One page more a row: the scheduler admits no row while those before it may soon want a page.
        pages = sum(-(-(len(prefix) + more_tokens) // PAGE_TOKENS) + 1 for prefix in prefixes)
        settings = DecoderSettings.model_validate(
            {
                "model": path,
                "kv_mode": "full",
                "block_tokens": BLOCK_TOKENS,
                "page_tokens": PAGE_TOKENS,
                "max_rows": len(prefixes),
                "max_model_len": max(map(len, prefixes)) + more_tokens,
                "max_step_tokens": max(STEP_TOKENS, len(prefixes) * more_tokens),
                "device_cache_tokens": pages * PAGE_TOKENS,
            }
        )
        self._prefixes = prefixes
        self._intact = max(map(len, prefixes))  # tokens of a row that are still its prefix's
        self._engine = OfflineEngine(settings, ARENA_BYTES, model)
        self._sequences = [
            Sequence(str(i), 0, prefix, Sampling(logprobs=True), 0, max_tokens=more_tokens)
            for i, prefix in enumerate(prefixes)
        ]
        for sequence in self._sequences:
            self._engine.scheduler.submit([sequence])
        while any(sequence.is_prefilling for sequence in self._sequences):
            self._engine.step()
        # Rows that were ready first have gone on for a few tokens; the first run rewinds them.
        assert all(sequence.row is not None for sequence in self._sequences)

    def answer(
        self,
        variant: Variant,
        prompts: ListOf[list[int]],
        known: ListOf[list[int]],
        tokens: int,
        kept: int | None = None,
    ) -> list[list[SampledToken]]:
        """Go on from the prefixes: prefill the rest of each prompt, then decode, greedily.

        Args:
            variant: what decode attends to.
            prompts: by row, what follows the prefix in the prompt; at least one token.
            known: by row, tokens that the answer must begin with; computed by decode steps like any other.
            tokens: length of every answer. Its first token is drawn from dense prefill's logits.
            kept: tokens of each prefix that are kept, a whole number of blocks; None = all. What lies behind
                is overwritten, so it may shrink from call to call, not grow.

        Returns:
            by row, the answer's tokens with their log probabilities.

        Raises:
            ValueError: `kept` lies inside a block, or behind what earlier calls left.
        """
        kept = self._intact if kept is None else kept
        if kept % BLOCK_TOKENS or kept > self._intact:
            raise ValueError(f"{kept} tokens cannot be kept: blocks of {BLOCK_TOKENS}, {self._intact} intact")
        self._intact = kept
        engine = self._engine
        runner = replace(engine.runner, heart=variant.heart(engine.runner))
        for sequence, prefix, more, forced in zip(
            self._sequences, self._prefixes, prompts, known, strict=True
        ):
            sequence.prompt = prefix[:kept] + more
            sequence.computed = min(kept, len(prefix))
            sequence.generated, sequence.known = [], forced
            sequence.max_tokens = tokens + 1  # so that no row is given up
        answers: list[list[SampledToken]] = [[] for _ in prompts]
        for _ in range(tokens):
            plan = engine.scheduler.plan()
            sampled = runner.run(plan)
            engine.scheduler.apply(plan, sampled)
            for answer, sequence in zip(answers, self._sequences, strict=True):
                assert sequence.row is not None
                answer.append(sampled[sequence.row])
        return answers
