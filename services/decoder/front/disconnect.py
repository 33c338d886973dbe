"""Work that ends when the client leaves. Knows ASGI's receive channel, nothing of what the work is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientLeft(Exception):
    """The connection closed before the answer was sent."""


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first.

    Args:
        receive: of a request whose body has been read, so that only a disconnect can come.
        work: what to do.

    Raises:
        ClientLeft: it did.
    """
    loop = asyncio.get_running_loop()
    working, watching = loop.create_task(work), loop.create_task(_until_left(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        # Both may be under way: this very coroutine can be cancelled at the end of the server.
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
