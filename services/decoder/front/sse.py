"""Server-sent events: a response that is a stream of JSON lines. Knows the format, not what is in it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.decoder.front.disconnect import ClientLeft, unless_client_leaves

DONE = b"data: [DONE]\n\n"


def event(json_text: str) -> bytes:
    """One event; JSON has no line breaks outside its strings, and escapes those inside."""
    return b"data: " + json_text.encode() + b"\n\n"


class EventStream(Response):
    """Sends each item of a generator as it comes; stops and says so when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[bool], None]) -> None:
        """Arguments.

        Args:
            events: whole events.
            on_end: called once, after the last item or instead of it; True = the client left. Clean-up
                belongs here: a generator that was never begun runs none of its own.
        """
        # Proxies must neither store nor gather the events.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = True  # so it counts when the server cancels this, too
        try:
            await unless_client_leaves(receive, self._send_all(send))
            left = False
        except ClientLeft:
            pass
        finally:
            await self._events.aclose()
            self._on_end(left)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for item in self._events:
            await send({"type": "http.response.body", "body": item, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
