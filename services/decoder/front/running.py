"""The answers that are being made right now, so that an end of the server can wait for them or cut them.

Used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.decoder.front.answer import Answer
from services.decoder.front.errors import ShuttingDown


class Running:
    """A set of answers, and whether new ones may join."""

    def __init__(self) -> None:
        self.draining = False
        self._answers: set[Answer] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._answers)

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
            if not self._answers:
                self._empty.set()

    async def drain(self, seconds: float) -> None:
        """Let nothing new in; wait for the rest, and cut it short after `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            for answer in self._answers:
                answer.interrupt()
