"""The frame around every message: 64 bytes that say whose it is, how long, which one, and what it sums up to.

Knows bytes; who may ask for what is answering.py's affair, what was asked is ledger.py's.

    [0, 4)    magic "HSF1"
    [4, 6)    kind, u16
    [6, 8)    zero
    [8, 16)   session, u64
    [16, 20)  generation, u32: the epoch of the session's attach; a peer that was restarted has another
    [20, 24)  reply bytes, u32: the longest body that the asker has room for
    [24, 32)  sequence, u64: an answer carries its request's
    [32, 40)  length of the body, bytes, u64
    [40, 56)  the session's key; zero in answers
    [56, 64)  checksum over bytes [0, 56) and the body
    [64, ...) the body

A transport may deliver less than was sent, or another's message: nothing of a frame counts before all of it
has been compared. Little-endian throughout.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from services.contract.transport.checksum import Checksum
from services.contract.transport.faults import Fault, TransportFault

FRAME_BYTES = 64
KEY_BYTES = 16
MAX_REQUEST_BYTES = 2**20
"""Longest body of a request. Bulk bytes travel in answers: who receives them says when, and where to."""
MAX_REPLY_BYTES = 2**27
_SUMMED = 56
_HEADER = struct.Struct("<4sHHQIIQQ16s")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"HSF1"


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1  # body: where to send answers; of transports without connections
    REQUEST = 2
    BYE = 3  # the asker goes; nothing is answered
    REPLY = 4
    REFUSAL = 5  # body: as `refusal.py` writes it


_KINDS = frozenset(map(int, Kind))


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client may say to a peer's data plane, as an authenticated attach told it."""

    session: int
    generation: int
    key: bytes  # KEY_BYTES


@dataclass(frozen=True, slots=True)
class Frame:
    """A header, read or to be written."""

    kind: Kind
    session: int
    generation: int
    reply_bytes: int
    sequence: int
    length: int
    key: bytes = bytes(KEY_BYTES)


def write_frame(frame: Frame, message: memoryview, checksum: Checksum) -> None:
    """Write the header before the body, which lies at `message[64 : 64 + frame.length]` already."""
    _HEADER.pack_into(
        message,
        0,
        _MAGIC,
        frame.kind,
        0,
        frame.session,
        frame.generation,
        frame.reply_bytes,
        frame.sequence,
        frame.length,
        frame.key,
    )
    total = checksum(message[:_SUMMED], message[FRAME_BYTES : FRAME_BYTES + frame.length])
    _CHECKSUM.pack_into(message, _SUMMED, total)


def read_frame(message: memoryview, most: int) -> Frame:
    """The header of a message whose body is to have `most` bytes at most; the body may still be on its way.

    Raises:
        TransportFault: LENGTH, it is no frame or its body is longer.
    """
    if len(message) < FRAME_BYTES:
        raise TransportFault(Fault.LENGTH, f"a message of {len(message)} bytes is no frame")
    magic, kind, _, session, generation, reply_bytes, sequence, length, key = _HEADER.unpack_from(message)
    if magic != _MAGIC or kind not in _KINDS:
        raise TransportFault(Fault.LENGTH, "the message does not begin with a frame")
    if length > most:
        raise TransportFault(Fault.LENGTH, f"the message has a body of {length} bytes, {most} are the most")
    return Frame(Kind(kind), session, generation, reply_bytes, sequence, length, key)


def check_body(frame: Frame, message: memoryview, checksum: Checksum) -> memoryview:
    """The body of a whole message.

    Raises:
        TransportFault: LENGTH or CHECKSUM.
    """
    if len(message) < FRAME_BYTES + frame.length:
        raise TransportFault(
            Fault.LENGTH, f"the message has {len(message) - FRAME_BYTES} bytes of {frame.length}"
        )
    body = message[FRAME_BYTES : FRAME_BYTES + frame.length]
    if _CHECKSUM.unpack_from(message, _SUMMED)[0] != checksum(message[:_SUMMED], body):
        raise TransportFault(Fault.CHECKSUM, "the message is not what was sent: its checksum differs")
    return body
