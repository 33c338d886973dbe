"""Bearer keys. Knows which paths are open; nothing of what the others do."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.decoder.front.error_handlers import error_response
from services.decoder.front.errors import InvalidApiKey
from services.decoder.front.routes.page import PATHS

OPEN_PATHS = frozenset(("/health", "/ready", "/metrics", "/version", "/openapi.json", *PATHS))
"""For probes, scrapers, tools and the status page's files; they tell nothing of anyone's prompts."""


class BearerAuth:
    """Middleware: lets in what has one of the keys, or all if there are none but urgent ones."""

    def __init__(self, app: ASGIApp, keys: Sequence[SecretStr], urgent_keys: Sequence[SecretStr]) -> None:
        self._app = app
        self._open = not keys
        self._urgent = [_digest(key.get_secret_value().encode()) for key in urgent_keys]
        self._digests = [_digest(key.get_secret_value().encode()) for key in keys] + self._urgent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        is_bearer = scheme.lower() == "bearer"
        if self._open or (is_bearer and _is_one_of(given, self._digests)):
            state = scope.setdefault("state", {})
            state["tenant"] = b"" if self._open else given
            state["urgent"] = is_bearer and _is_one_of(given, self._urgent)
            await self._app(scope, receive, send)
            return
        told = "that API key is not accepted" if key else "this server wants an API key"
        refused = InvalidApiKey(f"{told}; send the header Authorization: Bearer KEY")
        await error_response(refused)(scope, receive, send)


def tenant_of(request: Request) -> bytes:
    """Who shares computed prefixes with whom: 32 bytes of the key, empty where no keys are asked for."""
    tenant = getattr(request.state, "tenant", b"")
    assert isinstance(tenant, bytes)
    return tenant


def may_be_urgent(request: Request) -> bool:
    """Whether it came with one of the urgent keys."""
    return bool(getattr(request.state, "urgent", False))


def _is_one_of(given: bytes, digests: Sequence[bytes]) -> bool:
    # Digests are of one length, and every key is compared: time tells nothing of how near a guess was.
    return sum(hmac.compare_digest(given, digest) for digest in digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
