"""A UCX worker's address as it travels: sealed, because UCX ends the process when it is handed anything else.

    [0, 4)    magic "HSUA"
    [4, 12)   checksum of the rest, u64
    [12, 13)  length of UCX's version; then the version; then the address

Knows bytes; that a peer may be believed, the session's key says.
"""

from __future__ import annotations

import struct

from services.contract.transport.checksum import Checksum

_MAGIC = b"HSUA"
_CHECKSUM = struct.Struct("<Q")
_REST = len(_MAGIC) + _CHECKSUM.size


def seal_address(address: bytes, version: str, checksum: Checksum) -> bytes:
    """The address of a worker of UCX `version`."""
    rest = bytes([len(version)]) + version.encode() + address
    return _MAGIC + _CHECKSUM.pack(checksum(memoryview(_MAGIC), memoryview(rest))) + rest


def open_address(sealed: bytes, version: str, checksum: Checksum) -> bytes:
    """The worker's address, for UCX `version` to read.

    Raises:
        ValueError: it is none, it is damaged, or of a version of UCX whose addresses ours may not read.
    """
    rest = memoryview(sealed)[_REST:]
    if (
        not rest
        or sealed[: len(_MAGIC)] != _MAGIC
        or _CHECKSUM.unpack_from(sealed, len(_MAGIC))[0] != checksum(memoryview(_MAGIC), rest)
    ):
        raise ValueError("this is no address of a UCX worker")
    theirs = bytes(rest[1 : 1 + rest[0]]).decode()
    if theirs.split(".")[:2] != version.split(".")[:2]:
        raise ValueError(f"the peer runs UCX {theirs} and we {version}; install the same hotset on both")
    return bytes(rest[1 + rest[0] :])
