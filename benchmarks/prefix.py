"""Time to first token of a long prompt, the first time and again: what the prefix cache is worth to a client.

    python -m benchmarks.prefix [--tokens 4000] [--rounds 3]

Both services run as `make run` starts them, with the default model; the client streams over HTTP. Every round
asks with a prompt that nobody has seen, then with the same beginning and another last question.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from http.client import HTTPConnection
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks import report
from benchmarks.live_server import live_server
from benchmarks.real_text import real_tokens
from services.decoder.models.bundled.directory import default_model


def first_token_seconds(port: int, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first streamed piece, and the prompt tokens that were cached."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {answer.read(500)!r}")
    first, cached = 0.0, 0
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        first = first or time.perf_counter() - begun
        usage = json.loads(line[6:]).get("usage")
        if usage:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
    connection.close()
    return first, cached


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    wanted = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(default_model() / "tokenizer.json"))
    rows = []
    with tempfile.TemporaryDirectory() as scratch, live_server(Path(scratch) / "log") as server:
        port = server.port
        first_token_seconds(port, real_tokens(tokenizer, 600))  # warms up
        for number in range(wanted.rounds):
            prompt = real_tokens(tokenizer, wanted.tokens, skip=1000 + 7000 * number)
            question = real_tokens(tokenizer, 20, skip=60_000 + 100 * number)
            cold, none = first_token_seconds(port, prompt + question[:10])
            warm, cached = first_token_seconds(port, prompt + question[10:])
            rows.append({"cold_s": cold, "warm_s": warm, "ratio": cold / warm, "cached_tokens": cached})
            print(f"first {cold:.2f} s ({none} cached), again {warm:.3f} s ({cached} cached)", flush=True)
    ratio = statistics.median(row["ratio"] for row in rows)
    report.write("prefix", {"tokens": wanted.tokens, "rounds": rows, "prefix_ttft_ratio": ratio})
    print(f"prefix_ttft_ratio={ratio:.1f} ratio")


if __name__ == "__main__":
    main()
