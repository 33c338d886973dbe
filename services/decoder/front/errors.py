"""Every error the HTTP face answers with, and its OpenAI body. Knows nothing of engines or routes.

ApiError                 status  type                   code
+-- BadRequest           400     invalid_request_error  one of REQUEST_CODES
+-- InvalidApiKey        401     invalid_request_error  invalid_api_key
+-- PriorityNotAllowed   403     invalid_request_error  priority_not_allowed
+-- ModelNotFound        404     invalid_request_error  model_not_found
+-- UnknownUrl           404     invalid_request_error  unknown_url
+-- MethodNotAllowed     405     invalid_request_error  method_not_allowed
+-- BodyTooLarge         413     invalid_request_error  request_too_large
+-- NotJson              415     invalid_request_error  unsupported_media_type
+-- Overloaded           429     rate_limit_error       rate_limit_exceeded    Retry-After
+-- EngineFault          500     server_error           engine_error
+-- RequestEndsEngines   500     server_error           request_ends_engines   x-should-retry: false
+-- InternalFault        500     server_error           internal_error
+-- EngineNotReady       503     server_error           engine_not_ready       Retry-After
+-- EngineLost           503     server_error           engine_lost            Retry-After
+-- ShuttingDown         503     server_error           shutting_down          Retry-After
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

RequestCode = Literal[
    "context_length_exceeded",
    "invalid_json",
    "invalid_type",
    "invalid_value",
    "missing_required_parameter",
    "unknown_parameter",
    "unsupported_parameter",
]


class ErrorDetail(BaseModel):
    """The inside of OpenAI's error body."""

    message: str = Field(description="what happened and what to do, for people")
    type: str
    param: str | None = Field(None, description="the request field at fault")
    code: str | None = None


class ErrorBody(BaseModel):
    """OpenAI's error body."""

    error: ErrorDetail


class ApiError(HTTPException):
    """Root of the tree. An HTTPException, so that the framework passes it through from any depth."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retry_after_seconds: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        headers = {} if self.retry_after_seconds is None else {"retry-after": str(self.retry_after_seconds)}
        super().__init__(self.status, message, headers | dict(self.more_headers()))
        self.param = param
        self.answered_code = code or self.code

    def more_headers(self) -> Mapping[str, str]:
        """Headers beside Retry-After."""
        return {}

    def body(self) -> ErrorBody:
        """What the client is sent; text that is not valid Unicode is escaped."""
        return ErrorBody(
            error=ErrorDetail(
                message=_printable(str(self.detail)),
                type=self.type,
                param=None if self.param is None else _printable(self.param),
                code=self.answered_code,
            )
        )


class BadRequest(ApiError):
    """The request can never be served as it is."""

    status, type, code = 400, "invalid_request_error", "invalid_value"

    def __init__(
        self, message: str, *, param: str | None = None, code: RequestCode = "invalid_value"
    ) -> None:
        super().__init__(message, param=param, code=code)


class InvalidApiKey(ApiError):
    """No key, or one that is not accepted."""

    status, type, code = 401, "invalid_request_error", "invalid_api_key"

    def more_headers(self) -> Mapping[str, str]:
        return {"www-authenticate": "Bearer"}


class PriorityNotAllowed(ApiError):
    """More urgent than the request's key allows."""

    status, type, code = 403, "invalid_request_error", "priority_not_allowed"


class ModelNotFound(ApiError):
    """The model that was named is not served here."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class UnknownUrl(ApiError):
    """No such route."""

    status, type, code = 404, "invalid_request_error", "unknown_url"


class MethodNotAllowed(ApiError):
    """The route exists for other methods."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTooLarge(ApiError):
    """The request body is longer than max_body_bytes."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class NotJson(ApiError):
    """The body is not labelled application/json."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class Overloaded(ApiError):
    """The queue is full, or has kept the request too long; trying later may help."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"
    retry_after_seconds = 1


class EngineFault(ApiError):
    """The engine ended a choice with an error."""

    code = "engine_error"


class RequestEndsEngines(ApiError):
    """The engine died more than once while it worked on this request."""

    code = "request_ends_engines"

    def more_headers(self) -> Mapping[str, str]:
        # OpenAI's clients repeat a 5xx by themselves unless told otherwise.
        return {"x-should-retry": "false"}


class InternalFault(ApiError):
    """A fault of this program; its traceback is in the log."""


class EngineNotReady(ApiError):
    """The engine is starting, or starting again."""

    status, code = 503, "engine_not_ready"
    retry_after_seconds = 2


class EngineLost(ApiError):
    """The engine went away while it worked on this request, and no next life of it took the request up."""

    status, code = 503, "engine_lost"
    retry_after_seconds = 2


class ShuttingDown(ApiError):
    """The server finishes what runs and takes nothing new."""

    status, code = 503, "shutting_down"
    retry_after_seconds = 5


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
