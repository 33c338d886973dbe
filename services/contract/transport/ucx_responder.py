"""Answers over UCX, one thread and one worker for all requesters.

Knows workers, tags and answering. A requester says hello with its worker's address and its session's key;
only then is there an endpoint to it, and it goes with the session. Before that nothing is answered, so a
stranger costs one look at its message.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from services.contract.errors import InvalidRequest, SetupError
from services.contract.transport.answering import Answer, Answering
from services.contract.transport.checksum import load_checksum
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import FRAME_BYTES, MAX_REQUEST_BYTES, Frame, Kind
from services.contract.transport.ledger import IN_FLIGHT
from services.contract.transport.protocol import Service
from services.contract.transport.staging import Staging
from services.contract.transport.ucx_clients import Arrival, Clients, Sending
from services.contract.transport.ucx_tags import KIND_MASK, NUMBER_MASK, TO_RESPONDER, to_requester
from services.contract.transport.ucx_worker import UcxOptions, UcxWorker

_log = logging.getLogger(__name__)
_SWEEP_SECONDS = 1.0
_PAUSE_SECONDS = 0.05
_START_SECONDS = 30.0
_LONGEST = FRAME_BYTES + MAX_REQUEST_BYTES
_MOST_UNDER_WAY = 4 * IN_FLIGHT
"""Of one requester. It may have an answer, and its credit back, before UCX says that the answer has left."""
HELD_BYTES = 64 * 2**20
"""Answers under way that may lie in memory before the next request has to wait."""


class UcxResponder:
    """A Responder; see protocol.py."""

    def __init__(
        self,
        options: UcxOptions,
        service: Service,
        counters: TransportCounters,
        stall_seconds: float = 10.0,
    ) -> None:
        """Start; a requester that takes nothing for `stall_seconds` is let go.

        Raises:
            SetupError: ucxx or xxhash is missing, or UCX cannot be set up as `options` say.
        """
        self._options = options
        self._counters = counters
        self._staging = Staging()
        self._answering = Answering(service, load_checksum(), self._staging, counters)
        self._stall_seconds = stall_seconds
        self._arrivals: list[Arrival] = []  # messages that are still landing
        self._asked: deque[tuple[int, Frame, memoryview]] = deque()  # whole requests, not answered yet
        self._started = threading.Event()
        self._failed: SetupError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="data-ucx", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_SECONDS):
            raise SetupError(f"UCX did not start within {_START_SECONDS:.0f} s; see docs/transport.md")
        if self._failed is not None:
            self._thread.join()
            raise self._failed
        self.address = self._worker.address

    @property
    def held_bytes(self) -> int:
        """As the Protocol says."""
        return self._staging.taken_bytes

    @property
    def lanes(self) -> tuple[str, ...]:
        """What carries the bytes to the requesters that are connected."""
        return self._clients.lanes if self._thread.is_alive() else ()

    def close(self) -> None:
        """As the Protocol says."""
        if self._closing:
            return
        self._closing = True
        self._worker.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._worker = UcxWorker(self._options)
        except SetupError as error:
            self._failed = error
            self._started.set()
            return
        self._clients = Clients(self._worker, self._staging)
        self._started.set()
        swept = time.monotonic()
        while not self._closing:
            try:
                self._worker.run(self._turn, time.monotonic() + _SWEEP_SECONDS)
            except Exception:  # noqa: BLE001  # a fault of ours costs one message its answer, not all of theirs
                _log.exception("message_failed")
                time.sleep(_PAUSE_SECONDS)
            if time.monotonic() - swept >= _SWEEP_SECONDS:
                swept = time.monotonic()
                self._sweep(swept)
        self._clients.close()
        self._worker.close()
        self._arrivals.clear()

    def _turn(self) -> bool:
        """Do what can be done now; whether there was anything."""
        busy = self._closing
        while (probe := self._worker.arrived(TO_RESPONDER, KIND_MASK)) is not None:
            self._land(probe)
            busy = True
        for arrival in [arrival for arrival in self._arrivals if arrival.request.completed]:
            self._arrivals.remove(arrival)
            self._read(arrival)
            busy = True
        while self._asked and self._clients.held_bytes < HELD_BYTES:
            self._answer(*self._asked.popleft())
            busy = True
        return self._clients.reap() or busy

    def _land(self, probe: Any) -> None:
        """Take in what has arrived, whatever it is: UCX keeps it until somebody does."""
        buffer = self._staging.take(min(probe.length, _LONGEST) or 1)
        room = buffer[: min(probe.length, _LONGEST)] if probe.length else buffer[:1]
        request = self._worker.take(room, probe)
        number = probe.sender_tag.value & NUMBER_MASK
        self._arrivals.append(Arrival(request, buffer, probe.length, number, time.monotonic()))

    def _read(self, arrival: Arrival) -> None:
        message = bytes(arrival.buffer[: min(arrival.length, _LONGEST)])
        problem = self._worker.outcome(arrival.request)
        self._staging.give(arrival.buffer)
        if problem is not None:
            self._counters.fault(Fault.LENGTH if arrival.length > _LONGEST else Fault.LOST)
            return
        try:
            frame, body = self._answering.open(memoryview(message))
        except TransportFault as error:
            _log.warning("message_refused fault=%s error=%s", error.fault.value, error)
            return
        if frame.kind is Kind.HELLO:
            self._welcome(arrival.number, frame, body)
        elif frame.kind is Kind.BYE:
            if self._clients.session(arrival.number) == frame.session:
                self._clients.drop(arrival.number)
        elif self._clients.session(arrival.number) is None:
            self._counters.fault(Fault.SESSION)  # there is no endpoint to say so to
        else:
            self._asked.append((arrival.number, frame, body))

    def _welcome(self, number: int, frame: Frame, body: memoryview) -> None:
        """Connect to who says hello as a session that there is; a stranger hears nothing."""
        refusal = self._answering.stranger(frame)
        if refusal is not None:
            _log.warning("hello_refused fault=%s error=%s", refusal[0].value, refusal[1])
            return
        if not self._clients.add(number, frame.session, bytes(body), time.monotonic()):
            self._counters.fault(Fault.LOST)
            return
        self._send(number, frame, self._answering.welcome(frame))

    def _answer(self, number: int, frame: Frame, body: memoryview) -> None:
        session = self._clients.session(number)
        if session is None:
            return  # gone meanwhile
        if session != frame.session or self._clients.under_way(number) >= _MOST_UNDER_WAY:
            self._counters.fault(Fault.SESSION)
            error = InvalidRequest("another session than said hello, or more requests than credits")
            self._send(number, frame, self._answering.refuse(frame, Fault.SESSION, error))
            return
        self._send(number, frame, self._answering.answer(frame, body))

    def _send(self, number: int, frame: Frame, answer: Answer) -> None:
        tag = to_requester(frame.sequence)
        if not self._clients.send(Sending(number, answer.buffer, time.monotonic()), answer.length, tag):
            self._counters.fault(Fault.LOST)

    def _sweep(self, now: float) -> None:
        """Let go of requesters that take nothing, are gone, or whose session is over."""
        for number in self._clients.stalled(now - self._stall_seconds):
            self._counters.fault(Fault.DEADLINE)
            self._clients.drop(number)
        for number in self._clients.gone(self._answering.alive):
            self._clients.drop(number)
