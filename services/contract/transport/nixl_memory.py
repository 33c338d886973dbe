"""Another process's memory, read piece by piece into buffers of our own, each read by a deadline.

Knows an agent, addresses and time; not what the bytes mean. It belongs to one thread. After a
TransportFault only `close` is left: a read that a stopped peer left half done may still write into its
buffer until the agent is gone.
"""

from __future__ import annotations

import mmap
import os
import time
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from services.contract.errors import InvalidRequest
from services.contract.transport.checksum import load_checksum
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.nixl_address import open_place
from services.contract.transport.nixl_agent import NixlAgent, Pieces
from services.contract.transport.ucx_worker import UcxOptions

_SMALLEST_BYTES = 64 * 1024
_PAUSE_SECONDS = 50e-6  # between looks at a read, once it has not ended at once: nixl has nothing to sleep on


class Spans(NamedTuple):
    """Pieces of the far memory, in the order in which they are to lie here, one behind the other."""

    offsets: npt.NDArray[np.int64]  # [n] bytes from its beginning
    lengths: npt.NDArray[np.int64]  # [n] bytes, each above 0


class FarMemory(Protocol):
    """Memory that is read from afar, into buffers of its own."""

    @property
    def length(self) -> int:
        """Bytes there are to read."""

    def take(self, length: int) -> memoryview:
        """A buffer of at least `length` bytes to read into, the caller's until `give`."""

    def give(self, buffer: memoryview) -> None:
        """Take back a buffer that nobody reads any more."""

    def read(self, spans: Spans, into: memoryview, deadline: float) -> None:
        """Fill `into`, a part of a buffer taken, with the pieces that `spans` name.

        Args:
            spans: as many bytes as `into` has.
            into: contiguous and writable.
            deadline: monotonic, seconds.

        Raises:
            InvalidRequest: a piece lies outside the memory, or `into` is no such buffer.
            TransportFault: DEADLINE, LOST.
        """


class NixlMemory:
    """A FarMemory; see the top of this file."""

    def __init__(self, address: bytes, options: UcxOptions) -> None:
        """Of the responder with this address. Whether it lives, the first read finds out.

        Raises:
            TransportFault: LOST, the address is none or leads nowhere.
            SetupError: nixl or xxhash is missing, or nixl cannot be set up as `options` say.
        """
        self._agent = NixlAgent(options, serves=False)
        self.lanes = self._agent.lanes
        self._free: list[memoryview] = []
        self._starts: dict[int, int] = {}  # address -> length of what is registered
        try:
            self._place = open_place(address, self._agent.version, load_checksum())
            self._peer = self._agent.meet(self._place.metadata)
        except ValueError as error:
            self.close()
            raise TransportFault(Fault.LOST, str(error)) from error
        self.length = self._place.length

    def take(self, length: int) -> memoryview:
        """As FarMemory says."""
        for at, buffer in enumerate(self._free):
            if len(buffer) >= length:
                return self._free.pop(at)
        buffer = memoryview(mmap.mmap(-1, max(_SMALLEST_BYTES, 1 << (length - 1).bit_length())))
        self._starts[self._agent.register(buffer)] = len(buffer)
        return buffer

    def give(self, buffer: memoryview) -> None:
        """As FarMemory says."""
        self._free.append(buffer)

    def read(self, spans: Spans, into: memoryview, deadline: float) -> None:
        """As FarMemory says."""
        theirs, ours = self._pieces(spans, into)
        try:
            number = self._agent.read(self._peer, theirs, ours)
        except ValueError as error:
            raise TransportFault(Fault.LOST, str(error)) from error
        try:
            self._wait(number, deadline)
        except ValueError as error:
            raise TransportFault(Fault.LOST, str(error)) from error
        finally:
            self._agent.release(number)

    def close(self) -> None:
        """End the agent, and then let go of the buffers, which it may have written until now. Idempotent."""
        self._agent.close()
        self._free.clear()
        self._starts.clear()

    def _wait(self, number: int, deadline: float) -> None:
        awake = time.monotonic() + _PAUSE_SECONDS
        while not self._agent.done(number):
            now = time.monotonic()
            if now >= deadline:
                raise TransportFault(Fault.DEADLINE, "the peer's memory was not read within its time")
            if now < awake:
                os.sched_yield()
            else:
                time.sleep(_PAUSE_SECONDS)

    def _pieces(self, spans: Spans, into: memoryview) -> tuple[Pieces, Pieces]:
        """What nixl is told, once everything was compared: it would believe any address."""
        offsets, lengths = spans
        if into.readonly or not into.contiguous:
            raise InvalidRequest("nixl reads into contiguous, writable memory only")
        if not len(offsets) or len(offsets) != len(lengths) or lengths.min() <= 0 or offsets.min() < 0:
            raise InvalidRequest("a read of nothing, or of pieces that are none")
        if (lengths > self.length).any() or (offsets > self.length - lengths).any():
            raise InvalidRequest(f"there are only {self.length} bytes to read")
        total = int(lengths.sum())
        if total != into.nbytes:
            raise InvalidRequest(f"{total} bytes are to be read into {into.nbytes}")
        start = int(np.frombuffer(into, np.uint8).ctypes.data)
        if not any(
            first <= start and start + total <= first + length for first, length in self._starts.items()
        ):
            raise InvalidRequest("the buffer was not taken here")
        theirs, ours = np.zeros((2, len(offsets), 3), np.uint64)
        theirs[:, 0], theirs[:, 1] = offsets, lengths
        theirs[:, 0] += np.uint64(self._place.start)
        ours[:, 0], ours[:, 1] = np.cumsum(lengths) - lengths, lengths
        ours[:, 0] += np.uint64(start)
        return theirs, ours
