"""Work that something else may end first. Knows neither."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """What was to end the work came first."""


async def unless(stop: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if `stop` returns first.

    Raises:
        Stopped: it did.
    """
    loop = asyncio.get_running_loop()
    working, stopping = loop.create_task(work), loop.create_task(stop)
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Stopped
    finally:
        # Both may be under way: this very coroutine can be cancelled at the end of the server.
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
