"""Turns whatever a route raises into OpenAI's error JSON. Knows no route."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.decoder.front.errors import ApiError, BadRequest, MethodNotAllowed, NotJson, UnknownUrl
from services.decoder.front.schema.problems import first_problem


def error_response(error: ApiError) -> Response:
    """The answer that carries `error`: status, headers, OpenAI body."""
    return Response(
        error.body().model_dump_json(),
        status_code=error.status_code,
        headers=dict(error.headers or {}),
        media_type="application/json",
    )


def add_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error of the framework and of the routes in the one shape."""

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_as_api_error(request, error))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        if not _says_json(request):
            return error_response(NotJson("send the body as JSON, with Content-Type: application/json"))
        return error_response(first_problem(error.errors()))

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)


def _as_api_error(request: Request, error: HTTPException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return UnknownUrl(f"{where}: no such URL; see /openapi.json for those there are")
    if error.status_code == 405:
        refused = MethodNotAllowed(f"{where}: not with this method")
        refused.headers = {**(refused.headers or {}), **(error.headers or {})}
        return refused
    # The framework's only other one: a body that its JSON parser gave up on (encoding, depth, digits).
    return BadRequest(
        "the body is not JSON that can be read: bad encoding, nesting or number", code="invalid_json"
    )


def _says_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    return not kind or (kind.startswith("application/") and kind.endswith(("/json", "+json")))
