"""The error tree that both services raise, and the gRPC status of each branch.

Knows nothing of HTTP; the front has its own mapping to OpenAI's error JSON.

    HotsetError                  INTERNAL
    +-- InvalidRequest           INVALID_ARGUMENT     the caller asked for what can never work
    +-- StateConflict            FAILED_PRECONDITION  well formed, but not now: wrong geometry, draining
    |   +-- StaleReference       FAILED_PRECONDITION  page, session or epoch of an earlier life
    +-- NotFound                 NOT_FOUND            no such session or request
    +-- NoRoom                   RESOURCE_EXHAUSTED   full; trying later may help
    +-- Unavailable              UNAVAILABLE          the peer is starting, gone or unreachable
    +-- SetupError               FAILED_PRECONDITION  the machine or the settings do not allow it
        +-- Unauthenticated      UNAUTHENTICATED      the other service does not know this one
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc


class HotsetError(Exception):
    """Root of the tree. Every message is for people: what happened, and what to do."""

    status = grpc.StatusCode.INTERNAL


class InvalidRequest(HotsetError):
    """The request can never be served as it is."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class StateConflict(HotsetError):
    """The request does not fit the receiver's present state."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class StaleReference(StateConflict):
    """A page, session or epoch of an earlier life; it is refused, never served."""


class NotFound(HotsetError):
    """No such session, page or request."""

    status = grpc.StatusCode.NOT_FOUND


class NoRoom(HotsetError):
    """Everything is in use at the moment."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(HotsetError):
    """The other side is starting, gone or out of reach."""

    status = grpc.StatusCode.UNAVAILABLE


class SetupError(HotsetError):
    """The machine or the settings do not allow it; the message names the command that mends it."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(SetupError):
    """The token is missing or wrong."""

    status = grpc.StatusCode.UNAUTHENTICATED


ERROR_KIND_KEY = "hotset-error"
"""Trailing metadata that names the class raised, because several share a status."""

_BY_NAME: Mapping[str, type[HotsetError]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequest,
        StateConflict,
        StaleReference,
        NotFound,
        NoRoom,
        Unavailable,
        SetupError,
        Unauthenticated,
    )
}

_BY_STATUS: Mapping[grpc.StatusCode, type[HotsetError]] = {
    kind.status: kind for kind in (InvalidRequest, StateConflict, NotFound, NoRoom, Unavailable)
} | {grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable, grpc.StatusCode.CANCELLED: Unavailable}


def error_named(name: str, text: str) -> HotsetError:
    """The branch of the tree called `name`, raised elsewhere with `text`; the root where there is none."""
    return _BY_NAME.get(name, HotsetError)(text)


def from_rpc_error(error: grpc.RpcError) -> HotsetError:
    """The branch of the tree that a failed call stands for.

    Args:
        error: as raised by a gRPC stub, sync or asyncio; anything without a status counts as internal.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return HotsetError(str(error))
    named = dict(error.trailing_metadata() or ()).get(ERROR_KIND_KEY)
    kind = _BY_NAME.get(str(named)) or _BY_STATUS.get(error.code(), HotsetError)
    return kind(error.details() or error.code().name)
