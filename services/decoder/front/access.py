"""Around every HTTP request: its id, its one log line, its count, and a 500 for what nobody foresaw.

Knows ASGI; nothing of what routes do.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.decoder.front.error_handlers import error_response
from services.decoder.front.errors import InternalFault
from services.decoder.front.record import Record, state_with
from services.decoder.front.request_metrics import RequestMetrics
from services.decoder.front.routes.page import PATHS

REQUEST_ID_HEADER = "x-request-id"
# One that could break a log line, or fill it, is replaced.
_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_QUIET = ("/health", "/ready", "/metrics", *PATHS)

_log = logging.getLogger(__name__)


class Access:
    """Middleware, the outermost."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(_request_id(Headers(scope=scope)))
        scope["state"] = {**scope.get("state", {}), **state_with(record)}
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _log.exception("request_failed id=%s", record.request_id)
            if status:
                raise  # half an answer is out; the server closes the connection
            fault = InternalFault("the server failed on this request; its log says why")
            await error_response(fault)(scope, receive, send_with_id)
        finally:
            if record.client_left:
                status = 499  # nobody saw another
            self._metrics.http(scope["method"], _route(scope), status)
            self._log_line(scope, record, status)

    def _log_line(self, scope: Scope, record: Record, status: int) -> None:
        words = [
            f"request id={record.request_id} method={scope['method']} path={_route(scope)} status={status}",
            f"seconds={time.monotonic() - record.began:.3f}",
        ]
        if record.answer_id:
            tally = record.tally
            words += [
                f"answer={record.answer_id} prompt_tokens={tally.prompt_tokens}",
                f"cached_tokens={tally.cached_tokens} completion_tokens={tally.completion_tokens}",
                f"finish={','.join(tally.finishes) or 'none'}",
            ]
            if tally.first_token_seconds is not None:
                words.append(f"first_token_s={tally.first_token_seconds:.3f}")
        if record.error:
            words.append(f"error={record.error!r}")
        level = logging.DEBUG if scope["path"] in _QUIET and status in (200, 503) else logging.INFO
        _log.log(level, "%s", " ".join(words))


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The route's pattern; what clients make up is all one to a metric and a log."""
    return getattr(scope.get("route"), "path", "other")
