"""The status page at /, for people: files of this package, as they are, under a strict content policy.

Knows the files and their headers. What the page shows it asks of /metrics, /health and the API, as any
client does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from html import escape
from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response

_HEADERS = {
    # Nothing from elsewhere, nothing inline, no frame around it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_PARTS = {
    "status.css": "text/css",
    "status.js": "text/javascript",
    "figures.js": "text/javascript",
    "draw.js": "text/javascript",
    "ask.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_DASHBOARDS = "<!-- dashboards -->"

PATHS = ("/", *(f"/status/{name}" for name in _PARTS))


def add_routes(app: FastAPI, dashboards_url: str) -> None:
    """Add the page and its parts to `app`; `dashboards_url` is linked unless it is empty."""
    page = (files("services.decoder.front.page") / "index.html").read_text("utf-8")
    link = f'<a href="{escape(dashboards_url)}">Dashboards</a>' if dashboards_url else ""
    _add(app, "/", page.replace(_DASHBOARDS, link), "text/html")
    for name, kind in _PARTS.items():
        text = (files("services.decoder.front.page") / name).read_text("utf-8")
        _add(app, f"/status/{name}", text, kind)


def _add(app: FastAPI, path: str, text: str, kind: str) -> None:
    app.add_api_route(
        path,
        _answer(text, kind),
        methods=["GET", "HEAD"],
        response_class=Response,
        include_in_schema=False,  # for browsers, not for clients of the API
    )


def _answer(text: str, kind: str) -> Callable[[], Awaitable[Response]]:
    body = text.encode()

    async def answer() -> Response:
        return Response(body, headers=_HEADERS, media_type=kind)

    return answer
