"""The quality benchmark's short cut - one prefill for all variants - measures what the engine itself does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.quality.__main__ import main
from benchmarks.quality.prefilled import Prefilled
from benchmarks.quality.variant import DENSE, Variant
from benchmarks.real_text import real_tokens
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings

PREFIX, MORE, TOKENS = 192, 21, 12  # the prompt ends inside a block; the answer opens another one
VARIANTS = (DENSE, Variant(64), Variant(64, "layer"), Variant(64, dense_layers=2))


def own_engine(
    variant: Variant, mode: str, path: Path, model: CausalLM, prompts: list[list[int]], known: list[list[int]]
) -> list[list[float | None]]:
    """By row, the log probabilities that an engine with these very settings gives."""
    settings = DecoderSettings.model_validate(
        {
            "model": path,
            "kv_mode": mode,
            "selector": "quest" if variant.budget_tokens else "everything",
            "budget_tokens": variant.budget_tokens or 256,
            "quest_sharing": variant.quest_sharing,
            "dense_layers": variant.dense_layers,
            "max_model_len": 256,
        }
    )
    engine = OfflineEngine(settings, 2**28, model)
    sequences = [
        Sequence(str(i), 0, prompt, Sampling(logprobs=True), 0, max_tokens=TOKENS, known=tokens)
        for i, (prompt, tokens) in enumerate(zip(prompts, known, strict=True))
    ]
    for sequence in sequences:
        engine.scheduler.submit([sequence])
    logprobs: dict[str, list[float | None]] = {sequence.request_id: [] for sequence in sequences}
    while engine.scheduler.has_work:
        plan = engine.scheduler.plan()
        for sequence, tokens in engine.scheduler.apply(plan, engine.runner.run(plan)):
            logprobs[sequence.request_id] += [token.logprob for token in tokens]
    return list(logprobs.values())


def test_one_prefill_serves_all_variants(model_fp32: CausalLM, default_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    texts = [real_tokens(tokenizer, PREFIX + MORE + TOKENS, skip=4000 * i) for i in range(2)]
    prefilled = Prefilled(default_model, model_fp32, [text[:PREFIX] for text in texts], MORE + TOKENS)
    outcomes = []
    for kept, mode in ((PREFIX, "tiered"), (PREFIX // 2, "full")):
        prompts = [text[: kept + MORE] for text in texts]
        known = [text[kept + MORE : kept + MORE + TOKENS] for text in texts]
        for variant in VARIANTS:
            rows = prefilled.answer(variant, [p[kept:] for p in prompts], known, TOKENS, kept)
            ours = [[token.logprob for token in row] for row in rows]
            assert [[token.token for token in row] for row in rows] == known
            theirs = own_engine(variant, mode, default_model, model_fp32, prompts, known)
            for mine, other in zip(ours, theirs, strict=True):
                assert mine == pytest.approx(other, abs=1e-3)
            outcomes.append(ours)
    assert len({str([[round(x or 0, 2) for x in row] for row in o]) for o in outcomes}) == len(outcomes)


def test_what_was_overwritten_cannot_be_kept(model_fp32: CausalLM, default_model: Path) -> None:
    prefilled = Prefilled(default_model, model_fp32, [list(range(64))], 32)
    prefilled.answer(DENSE, [[5]], [[]], 2, kept=32)
    with pytest.raises(ValueError, match="32 intact"):
        prefilled.answer(DENSE, [[5]], [[]], 2, kept=48)
    with pytest.raises(ValueError, match="cannot be kept"):
        prefilled.answer(DENSE, [[5]], [[]], 2, kept=24)
    with pytest.raises(ValueError, match="multiples of 16"):
        Prefilled(default_model, model_fp32, [list(range(63))], 32)


def test_the_command_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    out = capsys.readouterr().out
    assert "| everything (dense) |" in out
    assert "| Quest 256, layer |" in out
    assert "kv_head_256_perplexity_over_dense=" in out
