"""Where a memory lies that is read over nixl, as it travels: sealed, because nixl parses what it is given.

    [0, 4)    magic "HSNM"
    [4, 12)   checksum of the rest, u64
    [12, 20)  where the memory begins, in its own process, u64
    [20, 28)  its length, bytes, u64
    [28, 29)  length of nixl's version; then the version; then the agent's metadata

Knows bytes. **Who has these may read and write that memory**: they are told over an authenticated wire.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from services.contract.transport.checksum import Checksum

_MAGIC = b"HSNM"
_CHECKSUM = struct.Struct("<Q")
_PLACE = struct.Struct("<QQ")
_REST = len(_MAGIC) + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class FarPlace:
    """A memory in another process."""

    start: int  # address there
    length: int  # bytes
    metadata: bytes  # of the agent that registered it


def seal_place(place: FarPlace, version: str, checksum: Checksum) -> bytes:
    """A place as an agent of nixl `version` offers it."""
    rest = _PLACE.pack(place.start, place.length) + bytes([len(version)]) + version.encode() + place.metadata
    return _MAGIC + _CHECKSUM.pack(checksum(memoryview(_MAGIC), memoryview(rest))) + rest


def open_place(sealed: bytes, version: str, checksum: Checksum) -> FarPlace:
    """The place, for an agent of nixl `version` to read.

    Raises:
        ValueError: it is none, it is damaged, or of a version of nixl whose metadata ours may not read.
    """
    rest = memoryview(sealed)[_REST:]
    if (
        len(rest) <= _PLACE.size
        or sealed[: len(_MAGIC)] != _MAGIC
        or _CHECKSUM.unpack_from(sealed, len(_MAGIC))[0] != checksum(memoryview(_MAGIC), rest)
    ):
        raise ValueError("this is no address of a memory behind nixl")
    start, length = _PLACE.unpack_from(rest)
    after = rest[_PLACE.size :]
    theirs = bytes(after[1 : 1 + after[0]]).decode()
    if theirs.split(".")[:2] != version.split(".")[:2]:
        raise ValueError(f"the peer runs nixl {theirs} and we {version}; install the same hotset on both")
    return FarPlace(start, length, bytes(after[1 + after[0] :]))
