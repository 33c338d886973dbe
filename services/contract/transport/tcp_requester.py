"""Asks over a plain TCP connection: the fallback, and what the tests hold the other transports against.

Knows sockets and the ledger. A peer answers in the order it was asked, and takes the next request when its
last answer has left: so answers are heard while a request is sent, or both would wait for each other.
"""

from __future__ import annotations

import select
import socket
import time
from functools import partial

from services.contract.transport.checksum import load_checksum
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import FRAME_BYTES, Credentials, Kind
from services.contract.transport.ledger import IN_FLIGHT, Ledger, out_of_time
from services.contract.transport.protocol import Capabilities, Reply, Ticket
from services.contract.transport.staging import Staging
from services.contract.transport.tcp_address import lane_of, parse_address


class TcpRequester:
    """A Requester; see protocol.py."""

    capabilities = Capabilities(remote=True, in_flight=IN_FLIGHT)

    def __init__(
        self, address: bytes, credentials: Credentials, counters: TransportCounters, seconds: float
    ) -> None:
        """Connect to a responder's address within `seconds`.

        Raises:
            TransportFault: LOST, nobody listens there or the address is none; DEADLINE.
            SetupError: xxhash is not installed.
        """
        self._ledger = Ledger(credentials, load_checksum(), counters)
        self._staging = Staging()
        self._answers: dict[int, Reply | Exception] = {}
        try:
            self._socket = socket.create_connection(parse_address(address), timeout=max(seconds, 0.001))
        except TimeoutError as error:
            counters.fault(Fault.DEADLINE)
            raise TransportFault(Fault.DEADLINE, f"no connection to {address!r} in time") from error
        except (OSError, ValueError) as error:
            counters.fault(Fault.LOST)
            raise TransportFault(Fault.LOST, f"no connection to {address!r}: {error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ready = select.poll()
        self._ready.register(self._socket, select.POLLIN | select.POLLOUT)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The interface's address."""
        return (lane_of(self._socket),)

    def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
        """As the Protocol says."""
        ticket, message = self._ledger.ask(Kind.REQUEST, body, reply_bytes, seconds)
        try:
            self._send(memoryview(message), ticket)
        except (OSError, TransportFault) as error:
            raise self._end(error, ticket) from error
        return ticket

    def wait(self, ticket: Ticket) -> Reply:
        """As the Protocol says."""
        while ticket.sequence not in self._answers:
            try:
                self._hear(ticket)
            except (OSError, TransportFault) as error:
                raise self._end(error, ticket) from error
        answer = self._answers.pop(ticket.sequence)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """As the Protocol says."""
        self._socket.close()
        self._answers.clear()

    def _send(self, message: memoryview, ticket: Ticket) -> None:
        """Send all of it by the deadline of `ticket`; while the socket takes nothing, hear what comes."""
        while message:
            self._until(ticket)
            ready = self._ready.poll(1000 * (self._socket.gettimeout() or 0.0))
            if any(events & select.POLLOUT for _, events in ready):
                message = message[self._socket.send(message) :]
            elif ready:
                self._hear(ticket)

    def _hear(self, ticket: Ticket) -> None:
        """Receive the next answer, whosever it is, by the deadline of `ticket`."""
        head = memoryview(bytearray(FRAME_BYTES))
        self._receive(head, ticket)
        frame, answered = self._ledger.header(head)
        buffer = self._staging.take(FRAME_BYTES + frame.length)
        message = buffer[: FRAME_BYTES + frame.length]
        message[:FRAME_BYTES] = head
        self._receive(message[FRAME_BYTES:], ticket)
        try:
            body = self._ledger.settle(frame, message)
        except TransportFault:
            raise
        except Exception as refusal:  # noqa: BLE001  # kept for who waits for it
            self._staging.give(buffer)
            self._answers[answered.sequence] = refusal
        else:
            self._answers[answered.sequence] = Reply(body, partial(self._staging.give, buffer))

    def _receive(self, into: memoryview, ticket: Ticket) -> None:
        while into:
            self._until(ticket)
            count = self._socket.recv_into(into)
            if not count:
                raise TransportFault(Fault.LOST, "the peer closed the connection")
            into = into[count:]

    def _until(self, ticket: Ticket) -> None:
        """Let the next call on the socket end by the deadline."""
        left = ticket.deadline - time.monotonic()
        if left <= 0:
            raise out_of_time(ticket)
        self._socket.settimeout(left)

    def _end(self, error: OSError | TransportFault, ticket: Ticket) -> TransportFault:
        """Close, and say why."""
        self.close()
        if isinstance(error, TimeoutError):
            fault = out_of_time(ticket)
        elif isinstance(error, TransportFault):
            fault = error
        else:
            fault = TransportFault(Fault.LOST, f"the peer is lost: {error}")
        self._ledger.counters.fault(fault.fault)
        return fault
