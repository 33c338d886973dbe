"""Asks without asking: what a service would answer is read out of its memory, over nixl, by who wants it.

Knows a reader and deadlines. Nobody at the peer packs, sums up or refuses; what is read must prove itself,
and that is the reader's affair: it looks at what guards the bytes before and after.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

from services.contract.errors import InvalidRequest, NotFound, StateConflict
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from services.contract.transport.ledger import out_of_time
from services.contract.transport.nixl_memory import NixlMemory
from services.contract.transport.protocol import Capabilities, Reply, Ticket


class Reader(Protocol):
    """Stands here for the service at the peer."""

    def answer(self, body: memoryview, out: memoryview, deadline: float) -> int:
        """Read what `body` asks for into the beginning of `out`, by `deadline`; its length in bytes.

        Raises:
            HotsetError: what is asked for is not there, or no longer.
            TransportFault: it was not read in time, or the peer is lost.
        """


class NixlRequester:
    """A Requester; see protocol.py. One request at a time, read while it is waited for."""

    capabilities = Capabilities(remote=True, in_flight=1, keyed=False, summed=False, slots=False)

    def __init__(self, memory: NixlMemory, reader: Reader, counters: TransportCounters) -> None:
        """Ask by `reader`, which reads `memory`; both are this requester's from now on."""
        self._memory: NixlMemory | None = memory
        self._reader = reader
        self._counters = counters
        self._asked: tuple[Ticket, bytes] | None = None
        self._sequence = 0

    @property
    def lanes(self) -> tuple[str, ...]:
        """What may carry the bytes, such as `may/tcp`: which of them does, nixl does not tell."""
        return () if self._memory is None else self._memory.lanes

    def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
        """As the Protocol says; the bytes are read by `wait`."""
        if self._memory is None:
            raise TransportFault(Fault.LOST, "this requester is at its end; make another")
        if len(body) > MAX_REQUEST_BYTES or not 0 <= reply_bytes <= MAX_REPLY_BYTES:
            raise InvalidRequest(f"a request of {len(body)} bytes for {reply_bytes} is too long")
        if self._asked is not None:
            raise StateConflict("a request is unanswered; wait for it first")
        self._sequence += 1
        ticket = Ticket(self._sequence, reply_bytes, time.monotonic() + seconds)
        self._asked = ticket, bytes(body)
        self._counters.requests += 1
        return ticket

    def wait(self, ticket: Ticket) -> Reply:
        """As the Protocol says."""
        memory = self._memory
        if memory is None or self._asked is None or self._asked[0].sequence != ticket.sequence:
            raise NotFound(f"request {ticket.sequence} is not under way")
        (_, body), self._asked = self._asked, None
        buffer = memory.take(max(1, ticket.reply_bytes))
        try:
            if time.monotonic() >= ticket.deadline:
                raise out_of_time(ticket)
            length = self._reader.answer(memoryview(body), buffer[: ticket.reply_bytes], ticket.deadline)
        except TransportFault as fault:
            self._counters.fault(fault.fault)
            self.close()  # the buffer goes with the agent: a late byte hits nothing that is used again
            raise
        except Exception:
            self._counters.fault(Fault.REFUSED)
            memory.give(buffer)
            raise
        self._counters.received_bytes += length
        return Reply(buffer[:length], partial(memory.give, buffer))

    def close(self) -> None:
        """As the Protocol says."""
        memory, self._memory = self._memory, None
        self._asked = None
        if memory is not None:
            memory.close()
