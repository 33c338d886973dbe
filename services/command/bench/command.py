"""The flags of `hotset bench`, its table, and its JSON."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.command.bench.measure import Figures, Prompts, check_length, run_round
from services.command.server import Server, add_server_flags
from services.contract.byte_size import format_bytes
from services.contract.progress import Progress


def run(arguments: Sequence[str]) -> int:
    """Exit status 0: measured and told.

    Raises:
        HotsetError: the server refuses, or does not answer.
    """
    parser = argparse.ArgumentParser(
        prog="hotset bench",
        description="Measure a running server with streams of real text that it has not seen.",
    )
    add_server_flags(parser)
    parser.add_argument(
        "--streams", type=_positive, nargs="+", default=[1, 4], help="streams at once, one round each"
    )
    parser.add_argument("--prompt-tokens", type=_positive, default=512, help="of each prompt")
    parser.add_argument("--answer-tokens", type=_positive, default=64, help="of each answer, at least 2")
    parser.add_argument(
        "--seed", type=int, default=None, help="the place in the text to begin at; default: any"
    )
    parser.add_argument(
        "--json", type=Path, default=None, help="write the figures here too; - = only them, to here"
    )
    asked = parser.parse_args(arguments)
    if asked.answer_tokens < 2:
        parser.error("--answer-tokens: no time lies between fewer than 2 tokens")
    server = Server.at(asked.url, asked.key)
    model = server.model()
    check_length(model["max_model_len"], asked.prompt_tokens, asked.answer_tokens)
    seed = random.randrange(10**6) if asked.seed is None else asked.seed
    prompts = Prompts(server, model["id"], seed)
    rounds: list[Figures] = []
    for streams in asked.streams:
        sizes = {
            "streams": streams,
            "prompt_tokens": asked.prompt_tokens,
            "answer_tokens": asked.answer_tokens,
        }
        tokens = streams * asked.answer_tokens
        with Progress(f"{streams} streams", tokens, "tokens") as progress:
            rounds.append(run_round(server, model["id"], prompts, sizes, progress.at))
    told = {
        "url": server.url,
        "model": model["id"],
        "seed": seed,
        "rounds": [each.as_json() for each in rounds],
    }
    report(told, rounds, asked.json)
    return 0


def report(told: Mapping[str, Any], rounds: Sequence[Figures], path: Path | None) -> None:
    """The table; the JSON where it was asked for."""
    text = json.dumps(told, indent=2) + "\n"
    if path == Path("-"):
        sys.stdout.write(text)
        return
    print(f"{told['model']} at {told['url']}, {rounds[0].prompt_tokens} tokens of prompt, ", end="")
    print(f"{rounds[0].answer_tokens} of answer")
    print(table(rounds))
    if path:
        path.write_text(text)


def table(rounds: Sequence[Figures]) -> str:
    """A line a round."""
    first = ("", "", "TTFT, ms", "TPOT, ms", "tokens", "hit", "fetched", "server's", "server's")
    second = ("streams", "median", "worst", "mean", "a second", "rate", "a token", "TTFT, ms", "TPOT, ms")
    lines = ["".join(f"{word:>10}" for word in words) for words in (first, second)]
    for each in rounds:
        fetched = (
            "-" if math.isnan(each.miss_bytes_per_token) else format_bytes(round(each.miss_bytes_per_token))
        )
        rate = "-" if math.isnan(each.hit_rate) else f"{each.hit_rate:.1%}"
        values = (
            each.streams,
            f"{each.ttft_median_ms:.0f}",
            f"{each.ttft_worst_ms:.0f}",
            f"{each.tpot_ms:.2f}",
            f"{each.tokens_per_s:.1f}",
            rate,
            fetched,
            f"{each.server_ttft_ms:.0f}",
            f"{each.server_tpot_ms:.2f}",
        )
        lines.append("".join(f"{value:>10}" for value in values))
    return "\n".join(lines)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 on")
    return int(text)
