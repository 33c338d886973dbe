"""Keeps one engine running: starts it, waits until it serves, starts it again when it dies.

Requests that were in an engine that died wait here for its next life; new ones are refused until it serves.
A first start that fails ends the front with the engine's reason; later ones are tried for ever, ever slower.
Knows no HTTP beside the errors that its users are to answer with.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from hotset.v1 import engine_pb2

from services.contract.errors import HotsetError, SetupError, Unavailable
from services.decoder.front.engine_client import EngineClient
from services.decoder.front.engine_process import EngineProcess
from services.decoder.front.errors import EngineLost, EngineNotReady, ShuttingDown

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
MOST_FAILED_STARTS = 3
"""In a row; then requests of the last life that served wait no longer."""
_DESCRIBE_SECONDS = 5.0
_POLL_SECONDS = 0.1

_log = logging.getLogger(__name__)


class StartFailed(HotsetError):
    """The engine ended, or said that it failed, before it served."""


class EngineStatus(Enum):
    """How the supervised engine is."""

    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class Supervisor:
    """One engine, through all its lives. Used from one event loop.

    Attributes:
        index: which engine of this front; a label of its metrics.
        status, detail: how it is now, and its progress for people.
        description: what it said of itself when it last began to serve; None before it first served.
        told: what it last said in this life; empty until it spoke.
        restarts: lives after the first.
    """

    def __init__(self, command: Callable[[Path], Sequence[str]], directory: Path, *, index: int = 0) -> None:
        """Arguments.

        Args:
            command: the program and arguments of an engine that listens on the socket given.
            directory: private to this process; each life's socket lies in it.
            index: which engine of this front.
        """
        self.index = index
        self.status = EngineStatus.STARTING
        self.detail = "the engine process starts"
        self.description: engine_pb2.EngineDescription | None = None
        self.told = engine_pb2.EngineDescription()
        self.restarts = 0
        self._command = command
        self._directory = directory
        self._client: EngineClient | None = None
        self._process: EngineProcess | None = None
        self._failed_starts = 0
        self._changed = asyncio.Event()  # set, and replaced, whenever a life begins to serve or cannot

    @property
    def client(self) -> EngineClient:
        """The engine, if it serves.

        Raises:
            EngineNotReady: it is starting, or starting again.
        """
        client = self.serving
        if client is None:
            raise EngineNotReady(f"the engine is not ready: {self.detail}; try again soon")
        return client

    @property
    def serving(self) -> EngineClient | None:
        """The engine; None if it does not serve now."""
        return None if self._client is None or self._client.is_gone else self._client

    async def next_life(self) -> EngineClient:
        """The engine, as soon as it serves again.

        Raises:
            EngineLost: MOST_FAILED_STARTS starts in a row failed.
            ShuttingDown: it is not started any more.
        """
        while self._client is None or self._client.is_gone:
            if self.status is EngineStatus.STOPPED:
                raise ShuttingDown("the server shut down before this answer was finished")
            if self._failed_starts >= MOST_FAILED_STARTS:
                raise EngineLost(
                    f"the engine that worked on this request went away, and {self._failed_starts} starts "
                    f"of it failed since, the last one so: {self.detail}; send the request again later"
                )
            await self._changed.wait()
        return self._client

    async def run(self) -> None:
        """Keep it running until cancelled, which ends it in order.

        Raises:
            SetupError: its very first start failed; the message is the engine's reason.
        """
        pause = FIRST_PAUSE_SECONDS
        try:
            while True:
                try:
                    served = await self._one_life()
                except StartFailed as error:
                    if self.description is None:
                        raise SetupError(str(error)) from error
                    served, self.detail = False, str(error)
                    self._failed_starts += 1
                    self._tell_change()
                self.status = EngineStatus.STARTING
                self.restarts += 1
                pause = FIRST_PAUSE_SECONDS if served else min(pause * 2, LONGEST_PAUSE_SECONDS)
                _log.error("engine_restart index=%d pause_s=%g reason=%r", self.index, pause, self.detail)
                await asyncio.sleep(pause)
        finally:
            self.status = EngineStatus.STOPPED
            self._tell_change()

    def kill(self) -> None:
        """SIGKILL the engine at once; for an exit that cannot wait."""
        if self._process is not None:
            self._process.kill()

    def remove_directory(self) -> None:
        """Remove the directory of sockets; for an exit that cannot wait."""
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _one_life(self) -> bool:
        """Start an engine and stay until it is gone; True once it served.

        Raises:
            StartFailed: it never served.
        """
        socket = self._directory / f"engine{self.index}-{self.restarts}.sock"
        process = self._process = await EngineProcess.start(self._command(socket))
        client = EngineClient(socket, self.index)
        ended = asyncio.get_running_loop().create_task(process.wait())
        try:
            await self._until_serving(process, client, ended)
            assert self.description is not None, "an engine serves that never described itself"
            rows = self.description.max_rows
            events = asyncio.get_running_loop().create_task(client.deal_out_events(rows))
            try:
                self._client, self.status, self._failed_starts = client, EngineStatus.READY, 0
                self._tell_change()
                await asyncio.wait((ended, events), return_when=asyncio.FIRST_COMPLETED)
                # The stream breaks an instant before the process is reaped; its status is the better reason.
                await asyncio.wait((ended,), timeout=1.0)
            finally:
                self._client = None
                events.cancel()
            self.detail = self._how_it_ended(process, ended)
            return True
        finally:
            await client.close()
            await process.stop()
            await asyncio.gather(ended, return_exceptions=True)
            self._process = None
            self.told = engine_pb2.EngineDescription()
            socket.unlink(missing_ok=True)

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until_serving(
        self, process: EngineProcess, client: EngineClient, ended: asyncio.Task[int]
    ) -> None:
        began = time.monotonic()
        while True:
            if ended.done():
                raise StartFailed(self._how_it_ended(process, ended))
            try:
                told = await client.describe(_DESCRIBE_SECONDS)
            except Unavailable:
                told = engine_pb2.EngineDescription()  # its socket is not there yet, or it is very busy
            else:
                self.told = told
            if told.state == engine_pb2.ENGINE_STATE_READY:
                break
            if told.state == engine_pb2.ENGINE_STATE_FAILED:
                raise StartFailed(told.detail or "the engine failed without saying why")
            self.detail = told.detail or self.detail
            await asyncio.wait((ended,), timeout=_POLL_SECONDS)
        self.description, self.detail = told, told.detail or "the engine serves"
        _log.info("engine_serves index=%d seconds=%.1f", self.index, time.monotonic() - began)

    def _how_it_ended(self, process: EngineProcess, ended: asyncio.Task[int]) -> str:
        if not ended.done():
            return "the engine's connection broke"
        status = ended.result()
        how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        error = process.last_error()
        return f"the engine ended ({how}): {error or 'see its lines in the log'}"
