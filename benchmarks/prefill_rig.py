"""Prompts on an idle engine, and transformers' own layers over the same weights: how long each takes.

Knows models and engines; not what is compared with what.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.models.attention_hook import ATTENTION_NAME
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings

HOT_BYTES = 2**31  # much less than a long row


def operations(spec: ModelSpec, weights: int, context: int) -> float:
    """Floating-point operations of a prompt of `context` tokens; the head runs for its last one only."""
    heads = int(spec.config.num_attention_heads)
    attention = 4 * spec.layers * heads * spec.head_dim * context * context / 2
    return 2 * weights * context + attention


def layer_weights(module: nn.Module) -> int:
    """Numbers in the layers' matrices."""
    layers = module.get_submodule("model.layers")
    return sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() == 2)


def engine_for(
    model: CausalLM, mode: str, longest: int, step_tokens: int, window_tokens: int
) -> OfflineEngine:
    """One row; no prefix is found again."""
    settings = DecoderSettings.model_validate(
        {
            "model": Path("synthetic"),
            "device": "cuda:0",
            "kv_mode": mode,
            "hot_bytes": HOT_BYTES,
            "max_rows": 1,
            "max_model_len": longest,
            "max_step_tokens": step_tokens,
            "window_tokens": window_tokens,
            "prefix_cache": False,
            "decode_graphs": False,
        }
    )
    spec = model.spec
    token_bytes = spec.layers * spec.kv_heads * 2 * spec.head_dim * model.dtype.itemsize
    return OfflineEngine(settings, int(longest * token_bytes * 1.1) + 2**28, model)


def seconds_of_prompt(engine: OfflineEngine, tokens: int) -> float:
    """From submission to the first token, on an idle engine."""
    prompt = torch.randint(1000, 30_000, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    sequence = Sequence("prompt", 0, prompt, Sampling(), 0, max_tokens=1)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    engine.generate([sequence])
    torch.cuda.synchronize()
    assert len(sequence.generated) == 1
    return time.perf_counter() - begun


@torch.inference_mode()
def seconds_of_peer(module: nn.Module, tokens: int) -> float:
    """Transformers' forward pass over a whole prompt, without a cache; the least of three."""
    module.set_attn_implementation("sdpa")  # type: ignore[operator]  # of a PreTrainedModel
    ids = torch.randint(1000, 30_000, (1, tokens), device="cuda")
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        module(input_ids=ids, use_cache=False, logits_to_keep=1)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]  # likewise
    return min(taken)
