"""The one place where an exception becomes a gRPC status: an interceptor each for sync and asyncio servers.

Knows the error tree, no service. A servicer raises from the tree and never calls `abort` itself; anything
else that it raises is a fault of ours: the caller is told INTERNAL, the log gets the traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import grpc

from services.contract.errors import ERROR_KIND_KEY, HotsetError

_log = logging.getLogger(__name__)

# gRPC types a method by its messages, which an interceptor cannot know: they are `Any` here. Quoted, because
# only the type stubs have the class as a generic.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def _status_of(error: Exception, method: str) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status, details and trailing metadata for `error`, which is logged if it is not the caller's doing."""
    if isinstance(error, HotsetError) and type(error) is not HotsetError:
        return error.status, str(error), ((ERROR_KIND_KEY, type(error).__name__),)
    _log.error("rpc_failed method=%s error=%s", method, type(error).__name__, exc_info=error)
    return grpc.StatusCode.INTERNAL, "internal error; the server's log has the traceback", ()


class ErrorInterceptor(grpc.ServerInterceptor):
    """For `grpc.server`: unary and server-streaming methods."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The method's handler, wrapped."""
        handler = continuation(handler_call_details)
        method = handler_call_details.method

        def fail(error: Exception, context: grpc.ServicerContext) -> NoReturn:
            status, details, metadata = _status_of(error, method)
            context.set_trailing_metadata(metadata)
            context.abort(status, details)
            raise error  # abort has raised already; the type checker does not know

        if handler is not None and handler.unary_unary is not None:
            unary = handler.unary_unary

            def call(request: Any, context: grpc.ServicerContext) -> Any:
                try:
                    return unary(request, context)
                except Exception as error:  # noqa: BLE001  # mapped and logged, none is swallowed
                    fail(error, context)

            return grpc.unary_unary_rpc_method_handler(
                call, handler.request_deserializer, handler.response_serializer
            )
        if handler is not None and handler.unary_stream is not None:
            streaming = handler.unary_stream

            def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
                try:
                    yield from streaming(request, context)
                except Exception as error:  # noqa: BLE001  # mapped and logged, none is swallowed
                    fail(error, context)

            return grpc.unary_stream_rpc_method_handler(
                stream, handler.request_deserializer, handler.response_serializer
            )
        return handler


class AioErrorInterceptor(grpc.aio.ServerInterceptor):
    """For `grpc.aio.server`: unary methods; streaming ones pass through."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        unary: Callable[[Any, Any], Awaitable[Any]] = handler.unary_unary
        method = handler_call_details.method

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await unary(request, context)
            except grpc.aio.AbortError:
                raise  # a status already, from a servicer that is not ours (health)
            except Exception as error:  # noqa: BLE001  # mapped and logged, none is swallowed
                status, details, metadata = _status_of(error, method)
                await context.abort(status, details, metadata)

        return grpc.unary_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )
