"""What a remote decoder asks of a store's data plane: pieces of pages, to be read or to be written.

Knows how that is written, little-endian, and not who may have it. A piece is a run of bytes of one page in
one region, a region one layer of one plane, numbered in the order of the layout.

    read     u32 READ, u32 zero, pieces; answered by their bytes, one behind the other
    write    u32 WRITE, u32 epoch, u64 number, u32 count, u32 zero, pieces, their bytes; answered by nothing

A session's writes are numbered upwards and asked one at a time. One whose number is not above the last that
was done in the epoch is answered and not done: a write whose answer got lost can be sent again, and one that
was given up and comes late changes nothing that was written after it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.contract.errors import InvalidRequest
from services.contract.layout import ArenaLayout

PIECE = np.dtype(
    [("page", "<u4"), ("generation", "<u4"), ("region", "<u4"), ("offset", "<u4"), ("size", "<u4")]
)
"""offset: bytes from the beginning of the page in that region."""

Pieces = npt.NDArray[np.void]
"""`[n]` of PIECE."""

_READ_HEAD = struct.Struct("<II")
_WRITE_HEAD = struct.Struct("<IIQII")
WRITE_OVERHEAD_BYTES = _WRITE_HEAD.size
READ_OVERHEAD_BYTES = _READ_HEAD.size


class Wanted(IntEnum):
    """The first word of a request to a store."""

    PAGES = 1  # whole pages, for another store
    READ = 2
    WRITE = 3


class Write(NamedTuple):
    """A write, read from a request; `data` is the transport's."""

    epoch: int
    number: int
    pieces: Pieces
    data: memoryview


class Region(NamedTuple):
    """One layer of one plane."""

    number: int
    plane: str
    layer: int
    offset: int  # of page 0 in the arena, bytes
    page_bytes: int


def regions_of(layout: ArenaLayout) -> Iterator[Region]:
    """All regions, in order."""
    number, offset = 0, layout.planes_offset
    for plane in layout.planes:
        for layer, part in enumerate(plane.layers):
            yield Region(number, plane.name, layer, offset, part.page_bytes)
            number += 1
            offset += layout.page_count * part.page_bytes


def wanted_of(body: memoryview) -> Wanted:
    """What a request is.

    Raises:
        InvalidRequest: none of ours.
    """
    first = int.from_bytes(body[:4], "little") if len(body) >= _READ_HEAD.size else 0
    if first not in list(Wanted):
        raise InvalidRequest(f"{len(body)} bytes that begin with {first} are no request")
    return Wanted(first)


def write_head(wanted: Wanted) -> bytes:
    """The beginning of a request that only reads."""
    return _READ_HEAD.pack(wanted, 0)


def read_request(pieces: Pieces) -> bytes:
    """A request to read `pieces`."""
    return write_head(Wanted.READ) + pieces.tobytes()


def write_request(epoch: int, number: int, pieces: Pieces, data: bytes | memoryview) -> bytes:
    """A request to write `data`, as many bytes as the pieces are long together."""
    head = _WRITE_HEAD.pack(Wanted.WRITE, epoch, number, len(pieces), 0)
    return b"".join((head, pieces.tobytes(), data))


def pieces_to_read(body: memoryview) -> Pieces:
    """The pieces that a request to read names.

    Raises:
        InvalidRequest: it names none, or is none.
    """
    rest = body[_READ_HEAD.size :]
    if wanted_of(body) is not Wanted.READ or not rest or len(rest) % PIECE.itemsize:
        raise InvalidRequest(f"{len(body)} bytes do not name pieces to read")
    return np.frombuffer(rest, PIECE)


def pieces_to_write(body: memoryview) -> Write:
    """What a request to write says; its pieces are as long together as its bytes.

    Raises:
        InvalidRequest: it names none, or is none, or has too few or too many bytes.
    """
    if wanted_of(body) is not Wanted.WRITE or len(body) < _WRITE_HEAD.size:
        raise InvalidRequest(f"{len(body)} bytes are no request to write")
    _, epoch, number, count, _ = _WRITE_HEAD.unpack_from(body)
    begins = _WRITE_HEAD.size + count * PIECE.itemsize
    if not count or begins > len(body):
        raise InvalidRequest(f"{len(body)} bytes do not name {count} pieces to write")
    pieces: Pieces = np.frombuffer(body[_WRITE_HEAD.size : begins], PIECE)
    total = int(pieces["size"].sum(dtype=np.uint64))
    if total != len(body) - begins:
        raise InvalidRequest(f"pieces of {total} bytes came with {len(body) - begins}")
    return Write(epoch, number, pieces, body[begins:])
