"""Work that ends when the client leaves. Knows ASGI's receive channel, nothing of what the work is."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from services.decoder.front.unless import Stopped, unless

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
    try:
        return await unless(_until_left(receive), work)
    except Stopped:
        raise ClientLeft from None


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
