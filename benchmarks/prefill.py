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

import torch

from benchmarks import report
from benchmarks.prefill_rig import engine_for, layer_weights, operations, seconds_of_peer, seconds_of_prompt
from benchmarks.synthetic import synthetic_config, synthetic_spec
from services.decoder.engine.assembly import dense_ops
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.weights import random_weights

WARM_TOKENS = 21_504  # through every pair of lengths that the attention plans for
SHORT, REPEATS = 16_384, 3  # prompts up to SHORT tokens are repeated


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
