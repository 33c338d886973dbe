"""What clients see over HTTP, `tiered` beside `full` with the same device memory for KV.

    python -m benchmarks.serve [--shape qwen3-8b] [--contexts 4096 32768 131072] [--streams 1 8 32 64]
                               [--device-bytes 80GiB] [--arena-bytes 64GiB] [--modes full tiered]

Both services run as `make run` starts them, with random weights of real shapes; every stream is a connection
of its own. Prompts share all but their last page, so that the store has them after the first and the clock is
that of decode; on the device each row has pages of its own, as rows of different prompts have. The last round
of the shortest context asks with prompts that nobody has seen, for the first token under load. What random
weights choose means nothing, so the miss rate stands beside each time: real text misses 7% at twice the
budget.

`tpot_ms` is the mean time between a stream's tokens while all streams run, or of all its tokens where they
never ran all at once. The GPU's own are `replay_ms`, a decode step from its inputs to its logits, and of all
steps of that time, with prompts' chunks or without, `busy_ms`, from the first launch to the last, and
`idle_us`, the wait for the next one. `ahead` is the share that was planned while the step before ran.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import report
from benchmarks.live_server import LiveServer, live_server
from benchmarks.synthetic import SHAPES, synthetic_config, write_checkpoint
from services.command.bench.streams import Round, ask
from services.contract.byte_size import parse_bytes
from services.contract.errors import HotsetError
from services.decoder.models.bundled.directory import default_model

_DECODED, _PLANNED = "hotset_decode_steps_total", "hotset_steps_planned_total"
_BUSY = "hotset_device_busy_seconds_total"
_PAGE_TOKENS = 64
_ANSWER_TOKENS = 160
_BOUNDS_SHARE = 1 / 16  # bytes of Quest's bounds beside those of the records, at 16 tokens a block
_VOCABULARY = 30_000  # ids that every tokenizer has


def prompts_of(context: int, count: int, shared: bool, salt: int) -> list[list[int]]:
    """`count` prompts of `context` tokens, alike but for their last page if `shared`."""
    draw = random.Random(context if shared else f"{context} {count} {salt}")
    beginning = [draw.randrange(_VOCABULARY) for _ in range(context - _PAGE_TOKENS)] if shared else []
    rest = random.Random(f"{context} {count} {salt} end")
    return [
        beginning + [rest.randrange(_VOCABULARY) for _ in range(context - len(beginning))]
        for _ in range(count)
    ]


async def measure(server: LiveServer, name: str, prompts: Sequence[Sequence[int]]) -> Mapping[str, float]:
    """One round of streams; see the module's docstring."""
    loop = asyncio.get_running_loop()
    scrapes: list[dict[str, float]] = []

    async def scrape() -> None:
        scrapes.append(await loop.run_in_executor(None, counters_of, server))

    done: Round = await ask(server.reached, prompts, _ANSWER_TOKENS, name, scrape, scrape)

    def grew(counter: str) -> float:
        return scrapes[-1][counter] - scrapes[0][counter]

    begin, end = done.window if done.window[0] < done.window[1] else (0.0, math.inf)
    tpots = [stream.token_seconds(begin, end) for stream in done.streams]
    decoded, steps, busy = (grew(name) for name in (_DECODED, _PLANNED, _BUSY))
    timed = steps and busy  # a CPU has no times of a GPU
    chosen = grew("hotset_hot_buffer_chosen_total")
    firsts = sorted(stream.first_token_seconds for stream in done.streams)
    return {
        "tpot_ms": 1e3 * statistics.fmean(tpots),
        "replay_ms": 1e3 * grew("hotset_decode_seconds_total") / decoded if decoded else math.nan,
        "idle_us": 1e6 * grew("hotset_device_idle_seconds_total") / steps if timed else math.nan,
        "busy_ms": 1e3 * busy / steps if timed else math.nan,
        "ahead": grew(f"{_PLANNED} ahead") / steps if steps else math.nan,
        "miss_rate": grew("hotset_hot_buffer_misses_total") / chosen if chosen else math.nan,
        "tokens_per_s": done.tokens / done.seconds,
        "peak_tokens_per_s": done.peak_tokens_per_second(),
        "ttft_median_ms": 1e3 * statistics.median(firsts),
        "ttft_worst_ms": 1e3 * firsts[-1],
    }


def counters_of(server: LiveServer) -> dict[str, float]:
    """Every metric, summed over its labels; of those with a label `planned`, each value's as well."""
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(server.reached.get("/metrics").decode()):
        for sample in family.samples:
            sums[sample.name] += sample.value
            if how := sample.labels.get("planned"):
                sums[f"{sample.name} {how}"] += sample.value
    return sums


def flags(mode: str, device_bytes: int, token_bytes: int, rows: int, longest: int) -> list[str]:
    """The decoder's, such that KV, index and hot slots of `mode` take `device_bytes`.

    Tiered divides them: index for every row at the longest context, but half of the bytes at most.
    """
    index_bytes = token_bytes * _BOUNDS_SHARE
    own = ["--no-share-device-pages"]
    if mode == "full":
        tokens = int(device_bytes / (token_bytes + index_bytes))
        return [*own, "--kv-mode", "full", "--device-cache-tokens", str(tokens)]
    tokens = int(min(rows * longest, device_bytes / 2 / index_bytes))
    hot_bytes = int(device_bytes - tokens * index_bytes)
    return [*own, "--device-cache-tokens", str(tokens), "--hot-bytes", str(hot_bytes)]


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own number")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--modes", nargs="+", default=["full", "tiered"], choices=["full", "tiered"])
    parser.add_argument(
        "--new-prompts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether the last round of the shortest context asks with prompts that nobody has seen",
    )
    parser.add_argument("--device-bytes", type=parse_bytes, default=parse_bytes("80GiB"))
    parser.add_argument("--arena-bytes", type=parse_bytes, default=parse_bytes("64GiB"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokenizer", type=Path, help="directory of a tokenizer; default: the bundled one")
    parser.add_argument("--checkpoint", type=Path, help="keep the random weights here, or find them here")
    parser.add_argument("--name", default="serve", help="of the result file")
    parser.add_argument("--logs", type=Path, help="directory of the servers' messages")
    wanted = parser.parse_args()
    longest = max(wanted.contexts) + _ANSWER_TOKENS + _PAGE_TOKENS
    gpu = report.gpu() if wanted.device != "cpu" else {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = wanted.checkpoint or Path(scratch) / wanted.shape
        if not (model / "config.json").is_file():
            config = synthetic_config(wanted.shape, wanted.layers)
            config.max_position_embeddings = max(config.max_position_embeddings, longest)
            write_checkpoint(config, model, wanted.tokenizer or default_model(), torch.device(wanted.device))
            torch.cuda.empty_cache()  # the server needs the device
        config = synthetic_config(wanted.shape, wanted.layers)
        token_bytes = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 2
        for mode in wanted.modes:
            most = max(wanted.streams)
            decoder = flags(mode, wanted.device_bytes, token_bytes, most, longest)
            decoder += ["--max-rows", str(most), "--device", wanted.device, "--max-model-len", str(longest)]
            log = (wanted.logs or Path(scratch)) / f"{mode}.log"
            arena = ["--arena-bytes", str(wanted.arena_bytes)]
            with live_server(log, decoder, arena, model=model) as server:
                for row in rounds(server, mode, wanted, model.name):
                    rows.append(row)
                    report.write(wanted.name, {**gpu, "model": wanted.shape, "rows": rows})
    for row in rows:
        if row["shared_prefix"] and row["replay_ms"]:
            of = f"{row['mode']}_{row['context']}_{row['streams']}"
            print(f"tpot_over_replay_{of}={row['tpot_ms'] / row['replay_ms']:.3f} ratio")


def rounds(server: LiveServer, mode: str, wanted: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """Every context and number of streams, a line each; one that the server refuses is told and left out."""
    for context in wanted.contexts:
        asyncio.run(ask(server.reached, prompts_of(context, 1, True, -1), 8, name))
        counts = [(count, True) for count in wanted.streams]
        if wanted.new_prompts and context == min(wanted.contexts):
            counts.append((max(wanted.streams), False))
        for count, shared in counts:
            try:
                figures = asyncio.run(measure(server, name, prompts_of(context, count, shared, count)))
            except HotsetError as error:
                print(f"{mode} {context} tokens, {count} streams: {error}", flush=True)
                continue
            row = {"mode": mode, "context": context, "streams": count, "shared_prefix": shared}
            # JSON knows no NaN; a CPU has no times of a GPU.
            row |= {key: None if math.isnan(value) else round(value, 3) for key, value in figures.items()}
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            yield row


if __name__ == "__main__":
    main()
