"""The arena file's first 64 KiB: who made it, how it is laid out, whether this program can read it.

Knows how to write and read the header in a buffer; opens no file.

    [0, 8)     magic "HOTSETAR"; zero = not laid out
    [8, 12)    layout version, u32
    [12, 16)   length of the description, u32
    [16, 32)   BLAKE2b-128 of the description
    [32, 36)   generation floor, u32: no page of an earlier layout had a greater generation
    [36, 40)   epoch, u32: of the latest attach
    [64, ...)  the description: JSON of page_tokens, fingerprint, planes (layers run-length encoded)

The two counters stand apart from the description, so that they outlive a new layout and a torn one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from itertools import groupby

from services.contract.errors import InvalidRequest, SetupError
from services.contract.layout import FILE_HEADER_BYTES, LAYOUT_VERSION
from services.contract.planes import Plane, PlaneLayer

_PREFIX = struct.Struct("<8sII16s")
PREFIX_BYTES = _PREFIX.size
"""The beginning of the header, which no two layouts have in common; the counters stand behind it."""
_MAGIC = b"HOTSETAR"
_BLANK = bytes(len(_MAGIC))
_COUNTER = struct.Struct("<I")
_GENERATION_FLOOR_OFFSET = 32
_EPOCH_OFFSET = 36
_DESCRIPTION_OFFSET = 64


@dataclass(frozen=True, slots=True)
class FileHeader:
    """What the clients declared when the arena was laid out."""

    page_tokens: int
    fingerprint: bytes  # of the model and its record format, 32 bytes
    planes: tuple[Plane, ...]

    def describe(self) -> bytes:
        """The description as it stands in the file.

        Raises:
            InvalidRequest: it does not fit the header.
        """
        runs = {
            plane.name: [
                [sum(1 for _ in same), layer.groups, layer.entries, layer.entry_bytes]
                for layer, same in groupby(plane.layers)
            ]
            for plane in self.planes
        }
        text = json.dumps(
            {"page_tokens": self.page_tokens, "fingerprint": self.fingerprint.hex(), "planes": runs}
        ).encode()
        room = FILE_HEADER_BYTES - _DESCRIPTION_OFFSET
        if len(text) > room:
            raise InvalidRequest(
                f"the planes' description takes {len(text)} bytes and the arena header has room for {room}; "
                "use fewer kinds of layers"
            )
        return text


class HeaderCounters:
    """The counters of the header in `buffer`; each write is one aligned word, so never torn."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    @property
    def generation_floor(self) -> int:
        """No page of an earlier layout had a greater generation."""
        return self._read(_GENERATION_FLOOR_OFFSET)

    @generation_floor.setter
    def generation_floor(self, value: int) -> None:
        _COUNTER.pack_into(self._buffer, _GENERATION_FLOOR_OFFSET, value)

    @property
    def epoch(self) -> int:
        """Of the latest attach; 0 before the first."""
        return self._read(_EPOCH_OFFSET)

    @epoch.setter
    def epoch(self, value: int) -> None:
        _COUNTER.pack_into(self._buffer, _EPOCH_OFFSET, value)

    def _read(self, offset: int) -> int:
        value: int = _COUNTER.unpack_from(self._buffer, offset)[0]
        return value


def blank_file_header(buffer: memoryview) -> None:
    """Make `buffer` read as not laid out; the counters stay."""
    buffer[: len(_MAGIC)] = _BLANK


def write_file_header(buffer: memoryview, header: FileHeader) -> None:
    """Write `header` at the start of `buffer`; the magic goes last, so a torn write reads as blank.

    Raises:
        InvalidRequest: the description does not fit the header; nothing is written.
    """
    text = header.describe()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    prefix = _PREFIX.pack(_MAGIC, LAYOUT_VERSION, len(text), digest)
    blank_file_header(buffer)
    buffer[_DESCRIPTION_OFFSET : _DESCRIPTION_OFFSET + len(text)] = text
    buffer[len(_MAGIC) : _PREFIX.size] = prefix[len(_MAGIC) :]
    buffer[: len(_MAGIC)] = prefix[: len(_MAGIC)]


def read_file_header(buffer: memoryview) -> FileHeader | None:
    """The header at the start of `buffer`, or None where none was written yet.

    Raises:
        SetupError: not an arena, another layout version, or a damaged description.
    """
    if len(buffer) < FILE_HEADER_BYTES:
        raise SetupError(f"the arena file has {len(buffer)} bytes, less than its header; delete the file")
    magic, version, length, digest = _PREFIX.unpack(buffer[: _PREFIX.size])
    if magic == _BLANK:
        return None
    if magic != _MAGIC:
        raise SetupError("the arena file is not hotset's; point --arena-dir elsewhere or delete the file")
    if version != LAYOUT_VERSION:
        raise SetupError(
            f"the arena file has layout version {version}, this program reads {LAYOUT_VERSION}; "
            "run the version that made it, or delete the file to start empty"
        )
    text = bytes(buffer[_DESCRIPTION_OFFSET : min(_DESCRIPTION_OFFSET + length, FILE_HEADER_BYTES)])
    if hashlib.blake2b(text, digest_size=16).digest() != digest:
        raise SetupError("the arena file's header is damaged; delete the file to start empty")
    description = json.loads(text)
    planes = tuple(
        Plane(name, tuple(PlaneLayer(*sizes) for count, *sizes in runs for _ in range(count)))
        for name, runs in description["planes"].items()
    )
    return FileHeader(description["page_tokens"], bytes.fromhex(description["fingerprint"]), planes)
