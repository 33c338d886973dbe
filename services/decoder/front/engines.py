"""The engines of this front, one a device: which one takes a request, and which goes on when one dies.

Knows how busy each is, and the beginnings of prompts as bytes; nothing of HTTP and text. docs/decisions/0034.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from hotset.v1 import engine_pb2

from services.contract.errors import SetupError
from services.decoder.front.engine_client import EngineClient
from services.decoder.front.errors import EngineLost, EngineNotReady
from services.decoder.front.supervisor import EngineStatus, Supervisor

BEGINNING_TOKENS = 256
"""Prompts that are the same so far would rather be on the same engine, which computes that part once."""
SLACK_CHOICES = 2
"""How many choices more than the least busy engine the one that a prompt would rather have may work on."""

EngineCommand = Callable[[int, Path], Sequence[str]]
"""Program and arguments of the engine of this number, which listens on the socket given."""


class Engines:
    """All supervised engines. Used from one event loop."""

    def __init__(self, command: EngineCommand, directory: Path, count: int) -> None:
        """Arguments.

        Args:
            command: how each is started.
            directory: private to this process; every socket lies in it.
            count: how many there are, at least one.
        """
        self.supervisors = tuple(
            Supervisor(_of(command, index), directory, index=index) for index in range(count)
        )

    @property
    def status(self) -> EngineStatus:
        """READY if any engine is."""
        states = {supervisor.status for supervisor in self.supervisors}
        return EngineStatus.READY if EngineStatus.READY in states else self.supervisors[0].status

    @property
    def detail(self) -> str:
        """How they are, for people; of one alone just its own words."""
        if len(self.supervisors) == 1:
            return self.supervisors[0].detail
        return "; ".join(f"engine {one.index}: {one.detail}" for one in self.supervisors)

    @property
    def description(self) -> engine_pb2.EngineDescription | None:
        """What the first that ever served said of itself: all have the same settings and kind of device.

        The longest prompt and answer is that of the engine with least room, so that each can take all.
        """
        told = [one.description for one in self.supervisors if one.description is not None]
        if not told:
            return None
        return min(told, key=lambda one: one.max_model_len_tokens)

    @property
    def rows(self) -> int:
        """Choices that all engines that serve run at once."""
        told = (one.description for one in self.supervisors if one.serving is not None)
        return sum(one.max_rows for one in told if one is not None)

    def check_ready(self) -> None:
        """Refuse what no engine can take now.

        Raises:
            EngineNotReady: none serves.
        """
        if not self._serving():
            raise EngineNotReady(f"the engine is not ready: {self.detail}; try again soon")

    def choose(self, prompt: Sequence[int], salt: bytes) -> EngineClient:
        """The engine for a new request: the one that such prompts go to, unless it has too much to do.

        Args:
            prompt: token ids.
            salt: prompts of different salts share nothing.

        Raises:
            EngineNotReady: none serves.
        """
        self.check_ready()
        serving = self._serving()
        least = min(client.choices for client in serving.values())
        beginning = array("I", prompt[:BEGINNING_TOKENS]).tobytes()

        def preference(index: int) -> bytes:
            # Rendezvous: when one comes or goes, only what goes to it, or went, changes its place.
            return hashlib.blake2b(index.to_bytes(4, "little") + salt + beginning, digest_size=8).digest()

        preferred = max(serving, key=preference)
        if serving[preferred].choices <= least + SLACK_CHOICES:
            return serving[preferred]
        return min(serving.values(), key=lambda client: client.choices)

    async def next_life(self) -> EngineClient:
        """The least busy engine, as soon as any serves: for what was in one that died.

        Raises:
            EngineLost: all have failed to start too often in a row.
            ShuttingDown: none is started any more.
        """
        if serving := self._serving():
            return min(serving.values(), key=lambda client: client.choices)
        loop = asyncio.get_running_loop()
        waiting = {loop.create_task(one.next_life()) for one in self.supervisors}
        lost: EngineLost | None = None
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        return task.result()
                    except EngineLost as error:
                        lost = error
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        assert lost is not None, "there is no engine to wait for"
        raise lost

    async def run(self) -> None:
        """Keep all of them running until cancelled, which ends them in order.

        Raises:
            SetupError: the very first start of one failed; the message is that engine's reason.
        """
        running = [asyncio.ensure_future(self._run(supervisor)) for supervisor in self.supervisors]
        try:
            await asyncio.gather(*running)
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL all of them at once; for an exit that cannot wait."""
        for supervisor in self.supervisors:
            supervisor.kill()

    def remove_directory(self) -> None:
        """Remove the directory of sockets; for an exit that cannot wait."""
        self.supervisors[0].remove_directory()

    async def _run(self, supervisor: Supervisor) -> None:
        try:
            await supervisor.run()
        except SetupError as error:
            if len(self.supervisors) == 1:
                raise
            raise SetupError(f"engine {supervisor.index}: {error}") from error

    def _serving(self) -> dict[int, EngineClient]:
        return {one.index: client for one in self.supervisors if (client := one.serving) is not None}


def _of(command: EngineCommand, index: int) -> Callable[[Path], Sequence[str]]:
    return lambda socket: command(index, socket)
