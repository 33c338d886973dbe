"""The Transport protocol: what both ends of every transport do, and who owns a buffer until when.

Bytes move **two-sided and packed**: one message asks, one message answers with everything asked for, one
behind the other. The asker decides how much it takes and when, so there is no push: who is to receive, asks.

Knows no transport. A `Requester` belongs to the thread that made it; a `Responder` runs a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an asker can count on."""

    remote: bool  # reaches another node; otherwise nothing is sent
    in_flight: int  # credits: requests that may be unanswered at once
    keyed: bool  # the source compares a session's key, and gives only what the session may have
    summed: bool  # the source sums bytes up, and what arrives is compared with that
    slots: bool  # answers for pieces of pages, read and written, not for whole sealed pages alone


@dataclass(frozen=True, slots=True)
class Request:
    """What a service is asked. `body` is the transport's and valid until `answer` returns."""

    session: int
    body: memoryview


@dataclass(frozen=True, slots=True)
class Grant:
    """What a session's requests must carry."""

    generation: int
    key: bytes


class Service(Protocol):
    """Stands behind a responder. Called by the responder's thread, one call at a time."""

    def grant(self, session: int) -> Grant | None:
        """What requests of `session` must carry; None if there is no such session, any more."""

    def answer(self, request: Request, out: memoryview) -> int:
        """Write the answer to the beginning of `out`, which is the transport's; its length in bytes.

        `out` has as many bytes as the asker has room for.

        Raises:
            HotsetError: the request is refused; the asker is told the error's class and text.
        """


@dataclass(slots=True)
class Ticket:
    """One request on its way."""

    sequence: int
    reply_bytes: int
    deadline: float  # on the monotonic clock


class Reply:
    """An answer, whole and compared. `payload` is the transport's until `release`, then it is no more."""

    def __init__(self, payload: memoryview, give: Callable[[], None]) -> None:
        self.payload = payload
        self._give: Callable[[], None] | None = give

    def __enter__(self) -> memoryview:
        return self.payload

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let the transport have the buffer back. Idempotent."""
        give, self._give = self._give, None
        self.payload = memoryview(b"")
        if give is not None:
            give()


class Requester(Protocol):
    """Asks one peer, as one session. After a TransportFault only `close` is left: what was under way is lost,
    and a new requester begins anew. Any other error is the service's and ends nothing.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What can be counted on."""

    @property
    def lanes(self) -> tuple[str, ...]:
        """What really carries the bytes, such as `tcp/eth0`."""

    def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
        """Ask; the answer, of `reply_bytes` at most, must be here within `seconds`. `body` is copied.

        Raises:
            InvalidRequest: the body or the answer is longer than MAX_REQUEST_BYTES, MAX_REPLY_BYTES.
            StateConflict: no credit is left; wait for an earlier request first.
            TransportFault: the peer is lost, or took nothing in time.
        """

    def wait(self, ticket: Ticket) -> Reply:
        """The answer, waited for until the ticket's deadline. Tickets may be waited for in any order.

        Raises:
            HotsetError: the service's refusal, as raised there; the requester goes on.
            TransportFault: no answer in time, the peer is lost, or the answer is not one.
        """

    def close(self) -> None:
        """Let go of everything, whatever state the peer is in, in bounded time. Idempotent."""


class Responder(Protocol):
    """Answers peers until `close`."""

    @property
    def address(self) -> bytes:
        """Where requesters find it; told to peers over the authenticated control wire only."""

    @property
    def held_bytes(self) -> int:
        """Buffers of answers under way; 0 when idle."""

    def close(self) -> None:
        """Stop, from any thread; its thread is gone afterwards. Idempotent."""
