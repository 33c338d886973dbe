"""The arena file's first 64 KiB: who made it, how it is laid out, whether this program can read it.

Knows how to write and read the header in a buffer; opens no file.

    [0, 8)     magic "HOTSETAR"
    [8, 12)    layout version, u32
    [12, 16)   length of the description, u32
    [16, 32)   BLAKE2b-128 of the description
    [32, ...)  the description: JSON of page_tokens, fingerprint, planes (layers run-length encoded)
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from itertools import groupby

from services.contract.errors import SetupError
from services.contract.layout import FILE_HEADER_BYTES, LAYOUT_VERSION
from services.contract.planes import Plane, PlaneLayer

_PREFIX = struct.Struct("<8sII16s")
_MAGIC = b"HOTSETAR"


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What the clients declared when the arena was laid out."""

    page_tokens: int
    fingerprint: bytes  # of the model and its record format, 32 bytes
    planes: tuple[Plane, ...]


def write_file_header(buffer: memoryview, header: FileHeader) -> None:
    """Write `header` at the start of `buffer`; the magic goes last, so a torn write reads as blank.

    Raises:
        SetupError: the description does not fit the header.
    """
    runs = {
        plane.name: [
            [sum(1 for _ in same), layer.groups, layer.entries, layer.entry_bytes]
            for layer, same in groupby(plane.layers)
        ]
        for plane in header.planes
    }
    text = json.dumps(
        {"page_tokens": header.page_tokens, "fingerprint": header.fingerprint.hex(), "planes": runs}
    ).encode()
    if len(text) > FILE_HEADER_BYTES - _PREFIX.size:
        raise SetupError(f"the planes' description takes {len(text)} bytes; the arena header has no room")
    digest = hashlib.blake2b(text, digest_size=16).digest()
    prefix = _PREFIX.pack(_MAGIC, LAYOUT_VERSION, len(text), digest)
    buffer[: len(_MAGIC)] = bytes(len(_MAGIC))
    buffer[_PREFIX.size : _PREFIX.size + len(text)] = text
    buffer[len(_MAGIC) : _PREFIX.size] = prefix[len(_MAGIC) :]
    buffer[: len(_MAGIC)] = prefix[: len(_MAGIC)]


def read_file_header(buffer: memoryview) -> FileHeader | None:
    """The header at the start of `buffer`, or None where none was written yet.

    Raises:
        SetupError: not an arena, another layout version, or a damaged description.
    """
    magic, version, length, digest = _PREFIX.unpack(buffer[: _PREFIX.size])
    if magic == bytes(len(_MAGIC)):
        return None
    if magic != _MAGIC:
        raise SetupError("the arena file is not hotset's; point --arena-dir elsewhere or delete the file")
    if version != LAYOUT_VERSION:
        raise SetupError(
            f"the arena file has layout version {version}, this program reads {LAYOUT_VERSION}; "
            "run the version that made it, or delete the file to start empty"
        )
    text = bytes(buffer[_PREFIX.size : _PREFIX.size + length])
    if hashlib.blake2b(text, digest_size=16).digest() != digest:
        raise SetupError("the arena file's header is damaged; delete the file to start empty")
    description = json.loads(text)
    planes = tuple(
        Plane(name, tuple(PlaneLayer(*sizes) for count, *sizes in runs for _ in range(count)))
        for name, runs in description["planes"].items()
    )
    return FileHeader(description["page_tokens"], bytes.fromhex(description["fingerprint"]), planes)
