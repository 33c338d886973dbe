"""The answer to a call of grpc.aio, with its failures as errors of ours. Knows no service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc

from services.contract.errors import Unavailable, from_rpc_error

_T = TypeVar("_T")


async def answer_of(call: Awaitable[_T]) -> _T:
    """What `call` answers.

    A channel that is closed cancels its calls, and grpc.aio then raises CancelledError in tasks that nobody
    cancelled: that is a lost connection, and must not end a task as if somebody had wanted it to.

    Raises:
        HotsetError: the other side's refusal.
        Unavailable: it does not answer, or the channel was closed meanwhile.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable("the connection was closed before the answer came") from None
