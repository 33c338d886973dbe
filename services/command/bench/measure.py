"""One round of streams against a running server: what its clients saw, and what it counted meanwhile.

Knows streams and metrics; prints nothing.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from services.command.bench.prose import real_text
from services.command.bench.streams import ask
from services.command.server import Server
from services.contract.errors import InvalidRequest

NOTHING = math.nan
"""Where there was nothing to count: no decode, or a server that shows no such metric."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one round. Times are milliseconds, as clients saw them, unless they begin with `server_`."""

    streams: int
    prompt_tokens: int
    answer_tokens: int
    ttft_median_ms: float
    ttft_worst_ms: float
    tpot_ms: float  # mean time between tokens of a stream, after its first
    tokens_per_s: float  # of all answers, from the first request to the last token
    hit_rate: float  # of the hot buffer
    miss_bytes_per_token: float  # fetched from the arena
    server_ttft_ms: float  # means of the server's own histograms
    server_tpot_ms: float

    def as_json(self) -> dict[str, float | None]:
        """With null for what is not there: JSON knows no NaN."""
        found: dict[str, float] = asdict(self)
        return {name: None if math.isnan(value) else round(value, 4) for name, value in found.items()}


class Prompts:
    """Prompts of real text, each from a place of its own, so that none begins as another does."""

    def __init__(self, server: Server, model: str, seed: int) -> None:
        """Ask the server for the text's tokens.

        Raises:
            HotsetError: it refuses, or does not answer.
        """
        asked = {"model": model, "prompt": real_text(), "add_special_tokens": False}
        self._tokens: list[int] = server.post("/tokenize", asked)["tokens"]
        self._next = seed

    def take(self, tokens: int, count: int) -> list[list[int]]:
        """`count` prompts of `tokens` tokens."""
        return [self._one(tokens) for _ in range(count)]

    def _one(self, tokens: int) -> list[int]:
        text, length = self._tokens, len(self._tokens)
        start = self._next % length
        self._next += 1009  # a prime: places come back only after all were used
        rounds = -(-(start + tokens) // length)
        return (text * rounds)[start : start + tokens]


def check_length(longest: int | None, prompt_tokens: int, answer_tokens: int) -> None:
    """Refuse what the server would refuse stream by stream.

    Raises:
        InvalidRequest: prompt and answer together are too long.
    """
    if longest is not None and prompt_tokens + answer_tokens > longest:
        raise InvalidRequest(
            f"{prompt_tokens} tokens of prompt and {answer_tokens} of answer are more than the {longest} "
            "that this server takes; lower --prompt-tokens or --answer-tokens"
        )


async def measure(
    server: Server,
    model: str,
    prompts: Sequence[Sequence[int]],
    answer_tokens: int,
    watch: Callable[[int], None] | None = None,
) -> Figures:
    """Ask with every prompt at once.

    Args:
        server: to ask.
        model: the name that it knows.
        prompts: token ids.
        answer_tokens: of each answer.
        watch: called now and then with the tokens that came so far.

    Raises:
        HotsetError: it refuses, or is gone.
    """
    before = server.metrics()
    done = await ask(server, prompts, answer_tokens, model, watch=watch)
    after = server.metrics()

    def grew(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    firsts = sorted(stream.first_token_seconds for stream in done.streams)
    tpots = [stream.token_seconds(0.0, math.inf) for stream in done.streams]
    return Figures(
        streams=len(prompts),
        prompt_tokens=len(prompts[0]),
        answer_tokens=answer_tokens,
        ttft_median_ms=1e3 * statistics.median(firsts),
        ttft_worst_ms=1e3 * firsts[-1],
        tpot_ms=1e3 * statistics.fmean(tpots),
        tokens_per_s=done.tokens / done.seconds,
        hit_rate=share(grew("hotset_hot_buffer_hits_total"), grew("hotset_hot_buffer_chosen_total")),
        miss_bytes_per_token=share(grew("hotset_hot_buffer_fetched_bytes_total"), done.tokens),
        server_ttft_ms=1e3 * mean(grew, "hotset_time_to_first_token_seconds"),
        server_tpot_ms=1e3 * mean(grew, "hotset_time_per_output_token_seconds"),
    )


def share(part: float, whole: float) -> float:
    """`part / whole`, NOTHING of nothing."""
    return part / whole if whole else NOTHING


def mean(grew: Callable[[str], float], histogram: str) -> float:
    """What a histogram observed meanwhile, on average."""
    return share(grew(f"{histogram}_sum"), grew(f"{histogram}_count"))


def run_round(
    server: Server, model: str, prompts: Prompts, sizes: Mapping[str, int], watch: Callable[[int], None]
) -> Figures:
    """`measure` from outside of a loop; `sizes` holds streams, prompt_tokens and answer_tokens."""
    asked = prompts.take(sizes["prompt_tokens"], sizes["streams"])
    return asyncio.run(measure(server, model, asked, sizes["answer_tokens"], watch))
