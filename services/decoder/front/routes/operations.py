"""Routes for operators: /health, /ready, /metrics, /version. They answer from the first moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from services.decoder.front.openapi import READY_ERRORS, plain_text
from services.decoder.front.schema.operations import Health, Ready, Version
from services.decoder.front.state import FrontState, front_state
from services.decoder.front.supervisor import EngineStatus
from services.decoder.front.version import version


def add_routes(app: FastAPI, registry: CollectorRegistry) -> None:
    """Add the routes to `app`; `registry` is what /metrics shows."""
    app.add_api_route("/health", health, response_model=Health, tags=["operations"])
    app.add_api_route("/ready", ready, response_model=Ready, responses=READY_ERRORS, tags=["operations"])
    app.add_api_route("/version", show_version, response_model=Version, tags=["operations"])
    app.add_api_route(
        "/metrics",
        _metrics(registry),
        response_class=Response,
        responses=plain_text("Prometheus' text format, or OpenMetrics where it is asked for"),
        tags=["operations"],
    )


async def health(front: Annotated[FrontState, Depends(front_state)]) -> Health:
    """The process lives: always 200."""
    engines = front.engines
    if front.running.draining:
        return Health(status="draining", detail=f"{len(front.running)} requests are being finished")
    ok = engines.status is EngineStatus.READY
    return Health(status="ok" if ok else "starting", detail=engines.detail)


async def ready(front: Annotated[FrontState, Depends(front_state)]) -> Ready:
    """Requests are taken: 200, or 503 with the reason."""
    front.engine()
    return Ready()


async def show_version() -> Version:
    """What runs here."""
    return Version(version=version())


def _metrics(registry: CollectorRegistry) -> Callable[..., object]:
    async def metrics(request: Request, front: Annotated[FrontState, Depends(front_state)]) -> Response:
        """Figures of this process and its engine."""
        await front.collector.refresh()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return metrics
