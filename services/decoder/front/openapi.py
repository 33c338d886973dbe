"""What /openapi.json says beyond the bodies: every status a route can answer with, streams, keys.

Knows FastAPI's schema maker and the error tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from services.decoder.front.auth import OPEN_PATHS
from services.decoder.front.errors import (
    ApiError,
    BadRequest,
    BodyTooLarge,
    EngineFault,
    EngineNotReady,
    ErrorBody,
    InvalidApiKey,
    ModelNotFound,
    NotJson,
    Overloaded,
    PriorityNotAllowed,
)

Responses = dict[int | str, dict[str, Any]]


def _errors(*kinds: type[ApiError]) -> Responses:
    described: Responses = {}
    for kind in kinds:
        described[kind.status] = {"model": ErrorBody, "description": (kind.__doc__ or "").split("\n")[0]}
        if kind.retry_after_seconds is not None:
            described[kind.status]["headers"] = {
                "Retry-After": {"description": "seconds", "schema": {"type": "integer"}, "required": True}
            }
    return described


PLAIN_ERRORS = _errors(InvalidApiKey, BodyTooLarge)
MODEL_ERRORS = PLAIN_ERRORS | _errors(ModelNotFound)
TEXT_ERRORS = _errors(BadRequest, NotJson)
GENERATION_ERRORS = (
    MODEL_ERRORS | TEXT_ERRORS | _errors(PriorityNotAllowed, Overloaded, EngineFault, EngineNotReady)
)
READY_ERRORS = _errors(EngineNotReady)


def streamed(chunk: str) -> Responses:
    """A 200 that may also be a stream of `chunk` objects; OpenAPI 3.1 has no schema for a stream's items."""
    text = f"the answer; with stream: true, server-sent events, each a {chunk}, and [DONE] at the end"
    return {200: {"description": text, "content": {"text/event-stream": {}}}}


def plain_text(description: str) -> Responses:
    """A 200 that is text."""
    schema = {"schema": {"type": "string"}}
    return {
        200: {
            "description": description,
            "content": {"text/plain": schema, "application/openmetrics-text": schema},
        }
    }


def schema_maker(app: FastAPI, *, model: str, keys_wanted: bool) -> Callable[[], dict[str, Any]]:
    """What is to take the place of `app.openapi`.

    Args:
        app: with all its routes.
        model: the one name that requests may give.
        keys_wanted: whether routes that are not open need a bearer key.
    """
    make = app.openapi
    made: list[dict[str, Any]] = []

    def openapi() -> dict[str, Any]:
        if not made:
            made.append(_corrected(make(), model, keys_wanted=keys_wanted))
        return made[0]

    return openapi


def _corrected(schema: dict[str, Any], model: str, *, keys_wanted: bool) -> dict[str, Any]:
    if keys_wanted:
        schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["bearer"] = {"type": "http", "scheme": "bearer"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            # FastAPI's own validation answer; ours is 400, in OpenAI's shape.
            operation["responses"].pop("422", None)
            if keys_wanted and path not in OPEN_PATHS:
                operation["security"] = [{"bearer": []}]
    for name in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(name, None)
    for body in ("ChatRequest", "CompletionRequest"):
        schema["components"]["schemas"][body]["properties"]["model"]["enum"] = [model]
    for body in ("TokenizeRequest", "DetokenizeRequest"):
        schema["components"]["schemas"][body]["properties"]["model"]["enum"] = [model, None]
    return schema
