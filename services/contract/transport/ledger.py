"""What a requester has asked and not heard yet, and whether what it hears is an answer to that.

Knows frames, credits and deadlines; not how messages travel. Time is the monotonic clock, in seconds.
"""

from __future__ import annotations

import secrets
import time

from services.contract.errors import InvalidRequest, StateConflict
from services.contract.transport.checksum import Checksum
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import (
    FRAME_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    Credentials,
    Frame,
    Kind,
    check_body,
    read_frame,
    write_frame,
)
from services.contract.transport.protocol import Ticket
from services.contract.transport.refusal import MAX_REFUSAL_BYTES, read_refusal

IN_FLIGHT = 4
"""Credits of a requester. Answers are large, so a few of them keep any lane busy."""
SEQUENCE_BITS = 48


class Ledger:
    """One requester's."""

    def __init__(self, credentials: Credentials, checksum: Checksum, counters: TransportCounters) -> None:
        self._credentials = credentials
        self._checksum = checksum
        self.counters = counters
        self.open: dict[int, Ticket] = {}  # by sequence, in the order asked
        # Begins anywhere, so that an answer meant for an earlier life of this client fits nothing.
        self._sequence = secrets.randbits(SEQUENCE_BITS - 2)

    def ask(
        self, kind: Kind, body: bytes | memoryview, reply_bytes: int, seconds: float
    ) -> tuple[Ticket, bytearray]:
        """Enter a request; its ticket and its message.

        Raises:
            InvalidRequest: it is too long, or asks for too much; StateConflict: no credit is left.
        """
        if len(body) > MAX_REQUEST_BYTES or not 0 <= reply_bytes <= MAX_REPLY_BYTES:
            raise InvalidRequest(f"a request of {len(body)} bytes for {reply_bytes} is too long")
        if len(self.open) >= IN_FLIGHT:
            raise StateConflict(f"{IN_FLIGHT} requests are unanswered; wait for one first")
        self._sequence += 1
        ticket = Ticket(self._sequence, reply_bytes, time.monotonic() + seconds)
        message = bytearray(FRAME_BYTES + len(body))
        message[FRAME_BYTES:] = body
        said = self._credentials
        frame = Frame(kind, said.session, said.generation, reply_bytes, ticket.sequence, len(body), said.key)
        write_frame(frame, memoryview(message), self._checksum)
        self.open[ticket.sequence] = ticket
        self.counters.requests += 1
        self.counters.sent_bytes += len(message)
        return ticket, message

    def header(self, message: memoryview) -> tuple[Frame, Ticket]:
        """What an answer says of itself, and what it answers; its body may still be on its way.

        Raises:
            TransportFault: it is no answer to anything asked.
        """
        frame = read_frame(message, MAX_REPLY_BYTES)
        ticket = self.open.get(frame.sequence)
        if ticket is None or frame.kind not in (Kind.REPLY, Kind.REFUSAL):
            raise TransportFault(Fault.SEQUENCE, f"answer {frame.sequence} is to nothing that was asked")
        if frame.session != self._credentials.session:
            raise TransportFault(Fault.SESSION, f"the answer is for session {frame.session:016x}")
        if frame.generation != self._credentials.generation:
            raise TransportFault(Fault.GENERATION, f"the answer is of epoch {frame.generation}")
        if frame.length > reply_room(ticket):
            raise TransportFault(
                Fault.LENGTH, f"the answer has {frame.length} bytes, {ticket.reply_bytes} were asked for"
            )
        return frame, ticket

    def settle(self, frame: Frame, message: memoryview) -> memoryview:
        """The body of a whole answer; its ticket is done and its credit is back.

        Raises:
            TransportFault: LENGTH, CHECKSUM. HotsetError: the answer is a refusal, and this is it.
        """
        body = check_body(frame, message, self._checksum)
        del self.open[frame.sequence]
        self.counters.received_bytes += FRAME_BYTES + frame.length
        if frame.kind is Kind.REFUSAL:
            error = read_refusal(body)
            if not isinstance(error, TransportFault):  # else whom it ends counts it, as every other fault
                self.counters.fault(Fault.REFUSED)
            raise error
        return body


def reply_room(ticket: Ticket) -> int:
    """Bytes that the body of an answer may have: a refusal always fits."""
    return max(ticket.reply_bytes, MAX_REFUSAL_BYTES)


def out_of_time(ticket: Ticket) -> TransportFault:
    """No answer by the ticket's deadline."""
    return TransportFault(Fault.DEADLINE, f"no answer to request {ticket.sequence} within its time")
