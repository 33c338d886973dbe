"""Decode speed on the CPU: transformers' generate, hotset full, hotset tiered, one run, same weights.

    python -m benchmarks.cpu_decode [--model DIR] [--context 4000] [--dtype bfloat16] [--rounds 6]

The systems take turns of a few tokens each, so that a noisy machine disturbs all of them alike; the
figures are medians over every token, the ratios are what to look at. Answers are forced to follow a real
text in all hotset runs, because a greedy answer that loops hardly misses.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks import report
from benchmarks.real_text import real_tokens
from services.decoder.engine.host_allocator import keep_freed_memory
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.models.bundled.directory import default_model
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings

BUDGET_TOKENS = 512
TURN_TOKENS = 8


class Transformers:
    """generate() with its default cache, continued turn by turn."""

    def __init__(self, path: Path, dtype: torch.dtype, prompt: list[int]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        # The argument was renamed in transformers 5.20.
        named = inspect.signature(self._model.forward).parameters
        keyword = "cache" if "cache" in named else "past_key_values"
        self._cache = {keyword: DynamicCache(config=self._model.config)}
        self._tokens = torch.tensor([prompt])
        self.turn(1)

    def turn(self, tokens: int) -> list[float]:
        """Generate; seconds of each token, from the streamer's calls."""
        stamps: list[float] = []

        class Clock:
            def put(self, value: torch.Tensor) -> None:
                stamps.append(time.perf_counter())

            def end(self) -> None:
                """Nothing is buffered."""

        with torch.inference_mode():
            self._tokens = self._model.generate(
                self._tokens,
                attention_mask=torch.ones_like(self._tokens),
                **self._cache,
                max_new_tokens=tokens + 1,
                min_new_tokens=tokens + 1,
                do_sample=False,
                streamer=Clock(),
            )
        # The first stamp is the prompt's, the second the first token's; what lies before is set-up.
        return [after - before for before, after in pairwise(stamps[1:])]


class Hotset:
    """An offline engine with `rows` rows that have all been prefilled."""

    def __init__(
        self, settings: DecoderSettings, model: CausalLM, prompts: list[list[int]], answer: int
    ) -> None:
        self.rows = len(prompts)
        self.engine = OfflineEngine(settings, 3 * 2**30, model)
        for i, prompt in enumerate(prompts):
            known = prompt[-answer:]
            sequence = Sequence(
                str(i), 0, prompt[:-answer], Sampling(), 0, max_tokens=answer + 1, known=known
            )
            self.engine.scheduler.submit([sequence])
        scheduler = self.engine.scheduler
        while scheduler.waiting or any(sequence.is_prefilling for sequence in scheduler.running):
            self.engine.step()
        self.engine.counters().zero_()

    def turn(self, tokens: int) -> list[float]:
        """Step; seconds of each step."""
        seconds = []
        for _ in range(tokens):
            begun = time.perf_counter()
            self.engine.step()
            seconds.append(time.perf_counter() - begun)
        return seconds

    @property
    def miss_rate(self) -> float:
        """Misses a chosen block, all layers."""
        totals = self.engine.counters().sum(0)
        return float(totals[Counter.MISSES] / totals[Counter.CHOSEN])


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="checkpoint; default: the bundled model")
    parser.add_argument("--context", type=int, default=4000, help="tokens before the first measured one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=6, help=f"turns of {TURN_TOKENS} tokens each")
    parser.add_argument(
        "--block-tokens", type=int, default=4, help="4 misses over 20%% at the least capacity"
    )
    parser.add_argument("--sharing", default="kv_head", choices=["kv_head", "layer"])
    wanted = parser.parse_args()
    keep_freed_memory()  # as the engine does
    path: Path = wanted.model or default_model()
    dtype: torch.dtype = getattr(torch, wanted.dtype)
    answer = (wanted.rounds + 2) * TURN_TOKENS
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    prompts = [real_tokens(tokenizer, wanted.context + answer, skip=5000 * i) for i in range(8)]
    model = CausalLM(ModelSpec.read(path), dtype, torch.device("cpu"))

    def hotset(mode: str, rows: int) -> Hotset:
        settings = DecoderSettings.model_validate(
            {
                "model": path,
                "kv_mode": mode,
                "budget_tokens": BUDGET_TOKENS,
                "block_tokens": wanted.block_tokens,
                "hot_tokens": BUDGET_TOKENS + wanted.block_tokens if mode == "tiered" else 0,
                "quest_sharing": wanted.sharing,
                "max_rows": rows,
                "max_step_tokens": 1024,
                "device_cache_tokens": max(8192, rows * (wanted.context + 512)),
            }
        )
        return Hotset(settings, model, prompts[:rows], answer)

    systems: dict[str, Transformers | Hotset] = {
        "transformers": Transformers(path, dtype, prompts[0][: wanted.context]),
        "full": hotset("full", 1),
        "tiered": hotset("tiered", 1),
        "tiered_x8": hotset("tiered", 8),
    }
    turns: dict[str, Callable[[int], list[float]]] = {name: system.turn for name, system in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(wanted.rounds + 1):
        for name, turn in turns.items():
            taken = turn(TURN_TOKENS)
            if number:  # the first round warms up
                seconds[name] += taken

    rate = {name: 1 / statistics.median(taken) for name, taken in seconds.items()}
    rate["tiered_x8"] *= 8
    miss_rate = {name: s.miss_rate for name, s in systems.items() if isinstance(s, Hotset)}
    print(f"{wanted.dtype}, context {wanted.context}, budget {BUDGET_TOKENS}, block {wanted.block_tokens}")
    for name, value in rate.items():
        print(f"  {name:<13}{value:8.1f} tokens/s   misses {100 * miss_rate.get(name, 0.0):5.1f} %")
    ratios = {
        "full_over_transformers": rate["full"] / rate["transformers"],
        "tiered_over_full": rate["tiered"] / rate["full"],
        "tiered_x8_over_tiered": rate["tiered_x8"] / rate["tiered"],
        "tiered_miss_rate": miss_rate["tiered"],
    }
    arguments = {name: str(value) for name, value in vars(wanted).items() if name != "model"}
    suffix = f"{wanted.dtype}_{wanted.context}_block{wanted.block_tokens}"
    report.write(
        f"cpu_decode_{suffix}",
        {"arguments": arguments, "tokens_per_s": rate, "miss_rate": miss_rate, **ratios},
    )
    for name, value in ratios.items():
        print(f"{name}={value:.3f} ratio")


if __name__ == "__main__":
    main()
