"""Lets other threads have something done in the event loop's turn, where nothing else of the store happens.

Knows the loop; not what is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from services.contract.errors import Unavailable

_T = TypeVar("_T")
_PATIENCE_SECONDS = 5.0


class Turns:
    """Called from any thread but the loop's own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, work: Callable[[], _T]) -> _T:
        """Have `work` done in one turn, and wait for it; what it returns or raises.

        Raises:
            Unavailable: the loop is busy with something else; `work` was not begun, and will not be.
        """
        done: Future[_T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001  # raised to whoever waits
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        try:
            return done.result(_PATIENCE_SECONDS)
        except TimeoutError:
            if done.cancel():
                raise Unavailable("the store is busy; ask again") from None
            return done.result()
