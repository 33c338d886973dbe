"""What can be wrong with a transfer, by kind; each kind is counted.

Knows no transport and no frame.
"""

from __future__ import annotations

from enum import StrEnum

from services.contract.errors import Unavailable


class Fault(StrEnum):
    """Why a request or a reply was refused, or never ended."""

    LENGTH = "length"  # shorter or longer than it says, too long for its buffer, or no frame at all
    CHECKSUM = "checksum"  # the bytes are not those that were sent
    SEQUENCE = "sequence"  # an answer to nothing that was asked
    SESSION = "session"  # no such session
    GENERATION = "generation"  # of an earlier attach of that session
    KEY = "key"  # not the session's key
    REFUSED = "refused"  # by the service behind the transport: a page that is not pinned, a stale reference
    DEADLINE = "deadline"  # no answer in time
    LOST = "lost"  # the peer is gone, or cannot be reached


class TransportFault(Unavailable):
    """A transfer failed; nothing of it may be used, and its requester is at its end."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
