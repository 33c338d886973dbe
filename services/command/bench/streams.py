"""Many streamed completions at once, as seen by their clients.

Knows HTTP and the clock. One thread reads all streams and does no more a token than note the time, so that
what it measures is the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from services.command.server import Server, refusal, unreachable
from services.contract.errors import InvalidRequest

_EVENT = b"data: {"
WATCH_SECONDS = 0.5


@dataclass(slots=True)
class Stream:
    """When one answer's pieces came; seconds of `time.perf_counter`."""

    asked: float
    tokens: int
    pieces: list[float] = field(default_factory=list)  # a few hold more than one token

    @property
    def first_token_seconds(self) -> float:
        """From the request to the first piece."""
        return self.pieces[0] - self.asked

    def token_seconds(self, begin: float, end: float) -> float:
        """Mean time between tokens that came in a window; NaN if fewer than two did."""
        seen = [at for at in self.pieces if begin <= at <= end]
        if len(seen) < 2:
            return float("nan")
        return (seen[-1] - seen[0]) / (len(seen) - 1) * len(self.pieces) / self.tokens


@dataclass(frozen=True, slots=True)
class Round:
    """Streams that were asked for together."""

    streams: list[Stream]

    @property
    def window(self) -> tuple[float, float]:
        """While every stream was giving tokens; ends before it begins where there was no such time."""
        return max(s.pieces[0] for s in self.streams), min(s.pieces[-1] for s in self.streams)

    @property
    def tokens(self) -> int:
        """Of all streams."""
        return sum(s.tokens for s in self.streams)

    @property
    def seconds(self) -> float:
        """From the first request to the last piece."""
        return max(s.pieces[-1] for s in self.streams) - min(s.asked for s in self.streams)

    def peak_tokens_per_second(self, span: float = 1.0) -> float:
        """The most pieces within any `span` seconds, told a second."""
        times = sorted(at for stream in self.streams for at in stream.pieces)
        span = min(span, max(times[-1] - times[0], 1e-3))
        most, begin = 0, 0
        for end, at in enumerate(times):
            while times[begin] < at - span:
                begin += 1
            most = max(most, end - begin + 1)
        return most / span


async def ask(
    server: Server,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    model: str,
    when_all_run: Callable[[], Awaitable[None]] | None = None,
    when_one_ends: Callable[[], Awaitable[None]] | None = None,
    watch: Callable[[int], None] | None = None,
) -> Round:
    """Ask with every prompt at once, `tokens` tokens each.

    Args:
        server: to ask.
        prompts: token ids.
        tokens: of each answer.
        model: the name that the server knows.
        when_all_run: called once every answer has begun; never, if one ends before another begins.
        when_one_ends: called when the first is through.
        watch: called now and then with the pieces that came so far.

    Raises:
        InvalidRequest: an answer was not what was asked for; the message is the server's.
        Unavailable: nobody answers.
    """
    streams = [Stream(time.perf_counter(), tokens) for _ in prompts]
    begun, ended = asyncio.Event(), asyncio.Event()

    async def one(stream: Stream, prompt: Sequence[int]) -> None:
        body = {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        encoded = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.host}\r\nconnection: close\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in server.headers().items())
        head += f"content-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n"
        try:
            seen = await listen(stream, head.encode() + encoded)
        except OSError as error:
            raise unreachable(server, error) from error
        ended.set()
        if len(stream.pieces) < tokens // 2:
            first, _, rest = seen.partition(b"\r\n\r\n")
            status = first.split(b" ")[1:2] or [b"none"]
            told = refusal(int(status[0]) if status[0].isdigit() else 0, rest)
            raise InvalidRequest(f"{len(stream.pieces)} pieces instead of {tokens}: {told}")

    async def listen(stream: Stream, request: bytes) -> bytes:
        """Note when pieces come; what came before the first of them."""
        reader, writer = await asyncio.open_connection(server.host, server.port, ssl=server.secure or None)
        try:
            stream.asked = time.perf_counter()
            writer.write(request)
            seen = b""
            while read := await reader.read(65536):
                now = time.perf_counter()
                if not stream.pieces:
                    seen += read
                    read = seen if _EVENT in seen else b""
                stream.pieces += [now] * read.count(_EVENT)
                if stream.pieces and all(other.pieces for other in streams):
                    begun.set()
            return seen
        finally:
            writer.close()

    async def call_after(event: asyncio.Event, call: Callable[[], Awaitable[None]] | None) -> None:
        await event.wait()
        if call is not None:
            await call()

    async def tell() -> None:
        while watch is not None:
            watch(sum(len(stream.pieces) for stream in streams))
            await asyncio.sleep(WATCH_SECONDS)

    telling = asyncio.create_task(tell())
    watching = [
        asyncio.create_task(call_after(*pair)) for pair in ((begun, when_all_run), (ended, when_one_ends))
    ]
    asking = [asyncio.create_task(one(*pair)) for pair in zip(streams, prompts, strict=True)]
    try:
        await asyncio.gather(*asking)
        if when_one_ends is not None:
            await watching[1]
    finally:
        for task in (telling, *watching, *asking):
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)  # the others leave with the one that failed
    return Round(streams)
