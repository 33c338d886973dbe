"""Small engines around tiny models that choose by an indexer of their own, for the tests of DSA."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from services.decoder.engine.latent_assembly import WrapTokens
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence, TokenIds
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings

ARENA_BYTES = 16 * 2**20
TOP_K = 16


class Case(NamedTuple):
    model_type: str
    changes: Mapping[str, object]


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,  # scales the attention, not the indexer
}

CASES: Mapping[str, Case] = {
    "deepseek": Case("deepseek_v32", {"rope_parameters": YARN}),
    "glm": Case("glm_moe_dsa", {"attention_bias": True}),
    # Layers 0, 1 and 4 choose; 2 and 3 follow 1.
    "glm shared": Case(
        "glm_moe_dsa", {"num_hidden_layers": 5, "index_topk_freq": 3, "index_skip_topk_offset": 2}
    ),
}


def prompt_of(length: int, seed: int = 3) -> list[int]:
    return torch.randint(3, 211, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(name: str, prompt: TokenIds, tokens: int, priority: int = 0) -> Sequence:
    return Sequence(name, 0, prompt, Sampling(), seed=0, max_tokens=tokens, priority=priority)


def engine_of(
    model: CausalLM | Path,
    arena_bytes: int = ARENA_BYTES,
    wrap_tokens: WrapTokens = lambda layer, selector: selector,
    /,
    **changes: object,
) -> OfflineEngine:
    """Of a loaded model, or of a checkpoint in fp32; few hot slots, so that many misses happen."""
    base: dict[str, object] = {
        "model": model if isinstance(model, Path) else "unused",
        "dtype": "float32",
        "block_tokens": 1,
        "budget_tokens": TOP_K,
        "hot_tokens": TOP_K + 1,
        "max_rows": 3,
        "max_step_tokens": 48,
        "window_tokens": 64,
    }
    settings = DecoderSettings.model_validate(base | changes)
    loaded = None if isinstance(model, Path) else model
    return OfflineEngine(settings, arena_bytes, loaded, wrap_tokens=wrap_tokens)


def check(engine: OfflineEngine) -> None:
    """Everything is back."""
    engine.scheduler.check_integrity()
    engine.runner.residence.check_integrity()
    assert engine.device_pages.free == engine.device_pages.count
