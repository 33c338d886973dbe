"""One engine as the front sees it: calls, and the event stream dealt out to whoever waits for it.

Lives for one life of an engine process. Used from one event loop. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from hotset.v1 import engine_pb2
from hotset.v1.engine_pb2_grpc import EngineStub

from services.contract.channel import CLIENT_OPTIONS
from services.contract.errors import HotsetError, Unavailable
from services.contract.rpc_call import answer_of
from services.decoder.front.in_flight import InFlight

if TYPE_CHECKING:
    from hotset.v1.engine_pb2_grpc import EngineAsyncStub  # exists in the stub's types only

SUBMIT_SECONDS = 30.0
ABORT_SECONDS = 10.0

_OPTIONS = (*CLIENT_OPTIONS, ("grpc.enable_http_proxy", 0))

_log = logging.getLogger(__name__)


class EngineGone:
    """Stands in a mailbox for every event that will not come: the engine went away."""


@dataclass(frozen=True)
class Arrival:
    """One event, and which of the owner's submissions it belongs to."""

    request_id: str
    event: engine_pb2.TokenEvent


class Interrupted:
    """Put into a mailbox to end its request early: this server shuts down."""


Mailbox = asyncio.Queue[Arrival | EngineGone | Interrupted]


class EngineClient:
    """Calls to one engine process, and its mailboxes."""

    def __init__(self, socket: Path, engine: int = 0) -> None:
        """Listen at `socket`; `engine` is its number behind the front."""
        self.engine = engine
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        self._stub: EngineAsyncStub = EngineStub(self._channel)
        self._in_flight: InFlight[Mailbox] = InFlight()
        self._aborts: set[asyncio.Task[None]] = set()
        self._rows = 0
        self._may_have_run: frozenset[str] = frozenset()
        self._gone = asyncio.Event()

    @property
    def is_gone(self) -> bool:
        """Whether this life of the engine has ended; none of its events is dealt out from then on."""
        return self._gone.is_set()

    @property
    def choices(self) -> int:
        """Choices that it works on or keeps waiting: all of them are this front's."""
        return self._in_flight.choices

    async def is_gone_within(self, seconds: float) -> bool:
        """Whether it ends so soon: calls may fail an instant before the event stream breaks."""
        try:
            async with asyncio.timeout(seconds):
                await self._gone.wait()
        except TimeoutError:
            return False
        return True

    def may_have_run(self, request_id: str) -> bool:
        """Whether the request may have had a row when the engine went away; False before that."""
        return request_id in self._may_have_run

    async def describe(self, timeout_seconds: float) -> engine_pb2.EngineDescription:
        """What it serves and how far its start is.

        Raises:
            Unavailable: it does not answer (yet).
        """
        return await answer_of(self._stub.Describe(engine_pb2.DescribeRequest(), timeout=timeout_seconds))

    async def stats(self, timeout_seconds: float) -> engine_pb2.EngineStats:
        """Its figures.

        Raises:
            Unavailable: it does not answer in time.
        """
        return await answer_of(self._stub.Stats(engine_pb2.EngineStatsRequest(), timeout=timeout_seconds))

    async def submit(self, request: engine_pb2.SubmitRequest, mailbox: Mailbox) -> None:
        """Queue a request; its events go to `mailbox` until `forget` is called.

        Raises:
            HotsetError: the engine's refusal, a branch of the tree (NoRoom: its queue is full).
            Unavailable: it is gone.
        """
        if self.is_gone:
            raise Unavailable("the engine went away")
        choices = [choice.index for choice in request.choices]
        self._in_flight.add(request.request_id, choices, priority=request.priority, mailbox=mailbox)
        try:
            await answer_of(self._stub.Submit(request, timeout=SUBMIT_SECONDS))
        except HotsetError as error:
            self.forget(request.request_id)
            if isinstance(error, Unavailable):
                self.abort(request.request_id)  # it may have been taken all the same
            raise

    def forget(self, request_id: str) -> None:
        """Send no more of this request's events anywhere."""
        self._in_flight.remove(request_id)

    def abort(self, request_id: str, choices: tuple[int, ...] = ()) -> None:
        """End choices (none named: all) soon; returns at once, and is harmless for ended ones."""
        if self.is_gone:
            return
        task = asyncio.get_running_loop().create_task(self._abort(request_id, choices))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def deal_out_events(self, rows: int) -> None:
        """Put every event into its mailbox until the engine goes away; then tell all of them.

        Args:
            rows: choices that the engine runs at once.
        """
        self._rows = rows
        try:
            async for batch in self._stub.Events(engine_pb2.EventsRequest()):
                for event in batch.events:
                    mailbox = self._in_flight.mailbox(event.request_id)
                    if mailbox is not None:
                        ended = event.finish_reason != engine_pb2.FINISH_REASON_UNSPECIFIED
                        self._in_flight.heard(event.request_id, event.choice, ended=ended)
                        mailbox.put_nowait(Arrival(event.request_id, event))
        except grpc.aio.AioRpcError as error:
            _log.warning("engine_stream_broke reason=%r", error.details())
        finally:
            self._tell_all_gone()

    async def close(self) -> None:
        """Drop the connection; whoever still waits learns that the engine is gone."""
        self._tell_all_gone()
        for task in self._aborts:
            task.cancel()
        await self._channel.close()

    def _tell_all_gone(self) -> None:
        if self.is_gone:
            return
        self._gone.set()
        self._may_have_run = self._in_flight.may_run(self._rows)
        for mailbox in self._in_flight.mailboxes():
            mailbox.put_nowait(EngineGone())
        self._in_flight = InFlight()

    async def _abort(self, request_id: str, choices: tuple[int, ...]) -> None:
        request = engine_pb2.AbortRequest(request_id=request_id, choices=choices)
        try:
            await answer_of(self._stub.Abort(request, timeout=ABORT_SECONDS))
        except HotsetError as error:
            _log.warning("abort_failed request=%s reason=%r", request_id, str(error))
