"""The answers that are being made right now, and what is done before them.

So that an end of the server can wait for them, or cut them short.

Used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from services.decoder.front.answer import Answer
from services.decoder.front.errors import ShuttingDown
from services.decoder.front.unless import Stopped, unless

T = TypeVar("T")


class Running:
    """A set of answers, and whether new ones may join."""

    def __init__(self) -> None:
        self.draining = False
        self._answers: set[Answer] = set()
        self._before = 0  # pieces of work
        self._cut = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._answers) + self._before

    def check_open(self) -> None:
        """Refuse new work during the end.

        Raises:
            ShuttingDown: `drain` was called.
        """
        if self.draining:
            raise ShuttingDown("this server is shutting down; send the request to another one")

    @contextmanager
    def holding(self, answer: Answer) -> Iterator[None]:
        """Count `answer` among those that run."""
        self._answers.add(answer)
        self._empty.clear()
        try:
            yield
        finally:
            self._answers.discard(answer)
            self._left()

    async def before(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which an answer needs first.

        Raises:
            ShuttingDown: it was cut short.
        """
        self._before += 1
        self._empty.clear()
        try:
            return await unless(self._cut.wait(), work)
        except Stopped:
            raise ShuttingDown("this server shut down before it began with this answer") from None
        finally:
            self._before -= 1
            self._left()

    async def drain(self, seconds: float) -> None:
        """Let nothing new in; wait for the answers that have begun, and cut them short after `seconds`."""
        self.draining = True
        self._cut.set()
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            for answer in self._answers:
                answer.interrupt()

    def _left(self) -> None:
        if not len(self):
            self._empty.set()
