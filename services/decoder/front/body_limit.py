"""Refuses a body that is too long while it comes in, so that no more than the limit is ever held.

Knows ASGI. A declared length is refused at once, a chunked body at the chunk that passes the limit.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.decoder.front.error_handlers import error_response
from services.decoder.front.errors import BodyTooLarge


class BodyLimit:
    """Middleware."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self._max_bytes:
            await error_response(self._refusal())(scope, receive, send)
            return
        came = 0

        async def receive_some() -> Message:
            nonlocal came
            message = await receive()
            if message["type"] == "http.request":
                came += len(message.get("body", b""))
                if came > self._max_bytes:
                    raise self._refusal()
            return message

        await self._app(scope, receive_some, send)

    def _refusal(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is longer than {self._max_bytes} bytes (max_body_bytes of the server)")
