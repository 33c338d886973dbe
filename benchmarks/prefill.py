"""Prefill speed on a GPU: tokens a second of full and tiered, from submission to the first token.

    python -m benchmarks.prefill [--model qwen3-8b] [--layers N] [--contexts 8192,...] [--modes full,tiered]
                                 [--step-tokens N] [--window-tokens N] [--peer-context 8192]

A prompt of random tokens goes through scheduler and runner in chunks as the settings cut them, alone. The
operations are those of the products (2 a weight and token) and of causal attention (2 a multiply-add; half of
the square). The peer is transformers' own forward pass over the same weights, eager, with torch's attention.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks import report
from benchmarks.synthetic import synthetic_config, synthetic_spec
from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.models.attention_hook import ATTENTION_NAME
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.models.weights import random_weights
from services.decoder.settings import DecoderSettings

WARM_TOKENS = 21_504  # through every pair of lengths that the attention plans for
HOT_BYTES = 2**31  # much less than a long row
SHORT, REPEATS = 16_384, 3  # prompts up to SHORT tokens are repeated


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


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's own number")
    parser.add_argument("--contexts", default="8192,32768,131072", help="prompt lengths, tokens")
    parser.add_argument("--modes", default="full,tiered")
    parser.add_argument("--step-tokens", type=int, default=0, help="0 = the server's default")
    parser.add_argument("--window-tokens", type=int, default=16384)
    parser.add_argument("--peer-context", type=int, default=8192, help="0 = no peer")
    wanted = parser.parse_args()
    contexts = [int(context) for context in wanted.contexts.split(",")]
    device = torch.device("cuda:0")
    config = synthetic_config(wanted.model, wanted.layers)
    config.max_position_embeddings = longest = max(*contexts, WARM_TOKENS) + 64
    spec = synthetic_spec(config)
    module = random_weights(spec, torch.bfloat16, device, 0)
    model = CausalLM(spec, torch.bfloat16, device, dense=dense_ops(device), model=module)
    weights = layer_weights(module)
    rows = []
    speed: dict[tuple[str, int], float] = {}

    def note(mode: str, context: int, seconds: float) -> None:
        speed[mode, context] = context / seconds
        tokens_s, rate = context / seconds, operations(spec, weights, context) / seconds / 1e12
        row = {"mode": mode, "context": context, "seconds": seconds}
        rows.append(row | {"tokens_s": tokens_s, "tflop_s": rate})
        print(
            f"{mode:<12} context {context:7d}  {seconds:8.3f} s  {tokens_s:8.0f} tokens/s  "
            f"{rate:5.0f} TFLOP/s",
            flush=True,
        )

    if wanted.peer_context:
        note("transformers", wanted.peer_context, seconds_of_peer(module, wanted.peer_context))
    for mode in wanted.modes.split(","):
        begun = time.perf_counter()
        engine = engine_for(model, mode, longest, wanted.step_tokens, wanted.window_tokens)
        ready = time.perf_counter()
        seconds_of_prompt(engine, WARM_TOKENS)
        print(f"{mode}: start {ready - begun:.1f} s, warm-up {time.perf_counter() - ready:.1f} s", flush=True)
        for context in contexts:
            repeats = REPEATS if context <= SHORT else 1
            note(mode, context, statistics.median(seconds_of_prompt(engine, context) for _ in range(repeats)))
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    report.write(
        "prefill",
        {
            **report.gpu(),
            "model": wanted.model,
            "layers": spec.layers,
            "step_tokens": wanted.step_tokens or "default",
            "window_tokens": wanted.window_tokens,
            "rows": rows,
        },
    )
    for context in contexts:
        if ("full", context) in speed and ("tiered", context) in speed:
            share = 100 * speed["tiered", context] / speed["full", context]
            print(f"prefill_tiered_of_full_{context}={share:.1f} %")


if __name__ == "__main__":
    main()
