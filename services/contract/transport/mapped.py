"""Asks without asking: the service stands in this process, over memory that both sides have mapped.

Knows the service. Nothing is sent, so there is nothing to frame; who may map the memory, the mount said.
"""

from __future__ import annotations

from functools import partial

from services.contract.errors import InvalidRequest, NotFound, StateConflict
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault
from services.contract.transport.frame import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from services.contract.transport.protocol import Capabilities, Reply, Request, Service, Ticket
from services.contract.transport.staging import Staging


class MappedRequester:
    """A Requester; see protocol.py. It answers at once, so no deadline is ever missed."""

    capabilities = Capabilities(remote=False, in_flight=1, keyed=False, summed=False, slots=False)
    lanes = ("mapped/memory",)

    def __init__(self, service: Service, session: int, counters: TransportCounters) -> None:
        self._service = service
        self._session = session
        self._counters = counters
        self._staging = Staging()
        self._asked: tuple[int, bytes] | None = None
        self._sequence = 0

    def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
        """As the Protocol says; the bytes are read by `wait`."""
        if len(body) > MAX_REQUEST_BYTES or not 0 <= reply_bytes <= MAX_REPLY_BYTES:
            raise InvalidRequest(f"a request of {len(body)} bytes for {reply_bytes} is too long")
        if self._asked is not None:
            raise StateConflict("a request is unanswered; wait for it first")
        self._sequence += 1
        self._asked = (self._sequence, bytes(body))
        self._counters.requests += 1
        return Ticket(self._sequence, reply_bytes, seconds)

    def wait(self, ticket: Ticket) -> Reply:
        """As the Protocol says."""
        if self._asked is None or self._asked[0] != ticket.sequence:
            raise NotFound(f"request {ticket.sequence} is not under way")
        body, self._asked = self._asked[1], None
        buffer = self._staging.take(max(1, ticket.reply_bytes))
        try:
            length = self._service.answer(
                Request(self._session, memoryview(body)), buffer[: ticket.reply_bytes]
            )
        except Exception:
            self._counters.fault(Fault.REFUSED)
            self._staging.give(buffer)
            raise
        self._counters.received_bytes += length
        return Reply(buffer[:length], partial(self._staging.give, buffer))

    def close(self) -> None:
        """As the Protocol says."""
        self._asked = None
