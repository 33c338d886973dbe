"""Puts the HTTP application together from parts handed in. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from services.decoder.front.access import Access
from services.decoder.front.auth import BearerAuth
from services.decoder.front.body_limit import BodyLimit
from services.decoder.front.error_handlers import add_error_handlers
from services.decoder.front.openapi import schema_maker
from services.decoder.front.routes import chat, completions, models, operations, page, text
from services.decoder.front.state import FrontState, attach
from services.decoder.front.version import version


def build_app(
    front: FrontState,
    registry: CollectorRegistry,
    *,
    api_keys: Sequence[SecretStr],
    urgent_keys: Sequence[SecretStr],
    max_body_bytes: int,
    dashboards_url: str,
) -> FastAPI:
    """The application.

    Args:
        front: what routes need.
        registry: what /metrics shows.
        api_keys: accepted bearer keys; none = open to all.
        urgent_keys: accepted too, and lift the limit of priority.
        max_body_bytes: longest request body.
        dashboards_url: what the status page links to; empty = nothing.
    """
    # No /docs: its page loads scripts from elsewhere.
    app = FastAPI(title="hotset", version=version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    attach(app, front)
    for routes in (chat, completions, models, text):
        routes.add_routes(app)
    operations.add_routes(app, registry)
    page.add_routes(app, dashboards_url)
    add_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(BearerAuth, keys=api_keys, urgent_keys=urgent_keys)
    app.add_middleware(Access, metrics=front.metrics)
    app.openapi = schema_maker(  # type: ignore[method-assign]  # FastAPI's documented way
        app, model=front.model, keys_wanted=bool(api_keys)
    )
    return app
