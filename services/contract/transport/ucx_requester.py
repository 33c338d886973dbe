"""Asks over UCX: shared memory, RDMA or TCP, whichever lanes UCX finds between two workers.

Knows tags, the ledger and a worker of its own, so that whatever a failed peer leaves half done goes with it.
"""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any, NamedTuple

from services.contract.transport.checksum import load_checksum
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import FRAME_BYTES, Credentials, Kind
from services.contract.transport.ledger import IN_FLIGHT, Ledger, out_of_time, reply_room
from services.contract.transport.protocol import Capabilities, Reply, Ticket
from services.contract.transport.staging import Staging
from services.contract.transport.ucx_lanes import check_lanes
from services.contract.transport.ucx_tags import NUMBER_MASK, to_requester, to_responder
from services.contract.transport.ucx_worker import TRUNCATED, UcxOptions, UcxWorker

_SPIN_BELOW_BYTES = 1 << 20
_GOODBYE_SECONDS = 0.05


class _Flight(NamedTuple):
    """A request and its answer on their way; both buffers are UCX's until both are done."""

    ticket: Ticket
    message: bytearray
    buffer: memoryview
    sending: Any
    receiving: Any


class UcxRequester:
    """A Requester; see protocol.py."""

    capabilities = Capabilities(remote=True, in_flight=IN_FLIGHT)

    def __init__(
        self,
        address: bytes,
        credentials: Credentials,
        counters: TransportCounters,
        seconds: float,
        options: UcxOptions,
    ) -> None:
        """Connect to a responder's address within `seconds`.

        Raises:
            TransportFault: DEADLINE, LOST; or the peer does not know these credentials.
            SetupError: ucxx or xxhash is missing, UCX cannot be set up, or uses lanes that `options` forbid.
        """
        self._ledger = Ledger(credentials, load_checksum(), counters)
        self._staging = Staging()
        self._flights: dict[int, _Flight] = {}
        self._number = secrets.randbits(48) & NUMBER_MASK
        self._worker = UcxWorker(options)
        self._endpoint: Any = None
        self.lanes: tuple[str, ...] = ()
        try:
            self._endpoint = self._worker.connect(address)
            hello = self._ask(Kind.HELLO, self._worker.address, 0, seconds)
            self.wait(hello).release()
            self.lanes = self._worker.lanes(self._endpoint)
            check_lanes(self.lanes, options.lanes)
        except ValueError as error:
            self.close()
            counters.fault(Fault.LOST)
            raise TransportFault(Fault.LOST, str(error)) from error
        except BaseException:
            self.close()
            raise

    def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
        """As the Protocol says."""
        return self._ask(Kind.REQUEST, body, reply_bytes, seconds)

    def wait(self, ticket: Ticket) -> Reply:
        """As the Protocol says."""
        flight = self._flights[ticket.sequence]
        receiving = flight.receiving

        def done() -> bool:
            return bool(receiving.completed) or not self._endpoint.alive

        if not self._worker.run(done, ticket.deadline, spin=ticket.reply_bytes < _SPIN_BELOW_BYTES):
            raise self._end(out_of_time(ticket))
        if not receiving.completed:
            raise self._end(TransportFault(Fault.LOST, "the peer is lost"))
        problem = self._worker.outcome(receiving)
        if problem is not None:
            fault = Fault.LENGTH if problem == TRUNCATED else Fault.LOST
            raise self._end(TransportFault(fault, f"the answer did not arrive: {problem}"))
        return self._settle(flight)

    def close(self) -> None:
        """As the Protocol says."""
        if self._worker is None:
            return
        if self._endpoint is not None:
            if self._endpoint.alive and not self._flights:
                self._say_goodbye()
            self._worker.disconnect(self._endpoint)
            self._endpoint = None
        for flight in self._flights.values():
            self._staging.drop(flight.buffer)
        self._worker.close()
        self._flights.clear()
        self._worker = None  # type: ignore[assignment]  # at its end, as the Protocol allows

    def _ask(self, kind: Kind, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
        if self._endpoint is None:
            raise TransportFault(Fault.LOST, "this requester is at its end; make another")
        ticket, message = self._ledger.ask(kind, body, reply_bytes, seconds)
        buffer = self._staging.take(FRAME_BYTES + reply_room(ticket))
        room = buffer[: FRAME_BYTES + reply_room(ticket)]
        receiving = self._worker.receive(room, to_requester(ticket.sequence))
        try:
            sending = self._worker.send(self._endpoint, message, to_responder(self._number))
        except ValueError as error:
            self._staging.drop(buffer)
            raise self._end(TransportFault(Fault.LOST, f"the peer is lost: {error}")) from error
        self._flights[ticket.sequence] = _Flight(ticket, message, buffer, sending, receiving)
        return ticket

    def _settle(self, flight: _Flight) -> Reply:
        message = flight.buffer[: FRAME_BYTES + reply_room(flight.ticket)]
        try:
            frame, ticket = self._ledger.header(message)
            if ticket is not flight.ticket:
                raise TransportFault(Fault.SEQUENCE, "the answer is to another request")
            body = self._ledger.settle(frame, message)
        except TransportFault as fault:
            raise self._end(fault) from None
        except Exception:
            self._land(flight)
            raise
        return Reply(body, partial(self._land, flight))

    def _land(self, flight: _Flight) -> None:
        """The buffer is ours again. The request has long been sent: it has been answered."""
        if self._flights.pop(flight.ticket.sequence, None) is not None:
            self._staging.give(flight.buffer)

    def _end(self, fault: TransportFault) -> TransportFault:
        self._ledger.counters.fault(fault.fault)
        self.close()
        return fault

    def _say_goodbye(self) -> None:
        """Let the responder forget us at once; it finds out by itself where this gets lost."""
        _, message = self._ledger.ask(Kind.BYE, b"", 0, _GOODBYE_SECONDS)
        try:
            sending = self._worker.send(self._endpoint, message, to_responder(self._number))
        except ValueError:
            return
        self._worker.run(lambda: bool(sending.completed), time.monotonic() + _GOODBYE_SECONDS)
