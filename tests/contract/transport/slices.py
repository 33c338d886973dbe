"""A service to test transports with: pieces of a known memory, one behind the other; and its one session."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from services.contract.errors import InvalidRequest
from services.contract.transport.frame import Credentials
from services.contract.transport.nixl_memory import NixlMemory, Spans
from services.contract.transport.protocol import Grant, Request

SESSION, GENERATION, KEY = 0x1234_5678_9ABC_DEF0, 3, b"0123456789abcdef"
CREDENTIALS = Credentials(SESSION, GENERATION, KEY)
MEMORY_BYTES = 8 * 2**20
_PIECE = struct.Struct("<II")

Piece = tuple[int, int]
"""Offset and length, bytes."""


def memory() -> memoryview:
    """The same bytes in every process."""
    numbers = np.random.default_rng(7).integers(0, 256, MEMORY_BYTES, np.uint8)
    return memoryview(numbers.tobytes())


def question(pieces: Sequence[Piece]) -> bytes:
    return b"".join(_PIECE.pack(*piece) for piece in pieces)


def expected(pieces: Sequence[Piece], source: memoryview) -> bytes:
    return b"".join(bytes(source[offset : offset + length]) for offset, length in pieces)


class Slices:
    """A Service."""

    def __init__(self) -> None:
        self.memory = memory()
        self.grants = {SESSION: Grant(GENERATION, KEY)}

    def grant(self, session: int) -> Grant | None:
        return self.grants.get(session)

    def answer(self, request: Request, out: memoryview) -> int:
        at = 0
        for offset, length in _PIECE.iter_unpack(request.body):
            if offset + length > MEMORY_BYTES:
                raise InvalidRequest(f"there is nothing at {offset}")
            if at + length > len(out):
                raise InvalidRequest("the asker has no room for that")
            out[at : at + length] = self.memory[offset : offset + length]
            at += length
        return at


class FarSlices:
    """The same as a Reader, of the memory in another process."""

    def __init__(self, far: NixlMemory) -> None:
        self.far = far

    def answer(self, body: memoryview, out: memoryview, deadline: float) -> int:
        pieces = np.array(list(_PIECE.iter_unpack(body)), np.int64).reshape(-1, 2)
        for offset, length in pieces:
            if offset + length > MEMORY_BYTES:
                raise InvalidRequest(f"there is nothing at {offset}")
        total = int(pieces[:, 1].sum())
        if total > len(out):
            raise InvalidRequest("the asker has no room for that")
        pieces = pieces[pieces[:, 1] > 0]
        if total:
            self.far.read(Spans(pieces[:, 0], pieces[:, 1]), out[:total], deadline)
        return total
