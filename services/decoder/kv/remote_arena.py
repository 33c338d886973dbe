"""The arena of a store that this engine cannot map: pieces of pages are asked for, and written in batches.

Knows the layout, requesters and one deadline; neither what the bytes mean nor how a session is kept. Calls
come from the engine's loop alone. Every call is over within its time: a connection that breaks is made anew
and the request asked again while there is time, which is safe because reading changes nothing and writes are
numbered. What fails raises and ends the connection, since other requests may be under way on it; the step
that fails drops what it staged.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.contract.errors import NotFound, StateConflict, Unavailable
from services.contract.layout import ArenaLayout
from services.contract.slot_request import (
    PIECE,
    READ_OVERHEAD_BYTES,
    WRITE_OVERHEAD_BYTES,
    Pieces,
    read_request,
    regions_of,
    write_request,
)
from services.contract.transport.frame import MAX_REQUEST_BYTES
from services.contract.transport.protocol import Requester, Ticket

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Numbers = npt.NDArray[np.integer]

_ANSWER_BYTES = 4 * 2**20  # of one answer; several are under way
_MOST_PIECES = (MAX_REQUEST_BYTES - READ_OVERHEAD_BYTES) // PIECE.itemsize
_PIECE_BYTES = 256 * 1024  # of a piece that is written, at most
_WRITE_BYTES = MAX_REQUEST_BYTES - WRITE_OVERHEAD_BYTES  # of one write, its pieces included
_PAUSE_SECONDS = 0.1  # between tries to connect


class Connection(NamedTuple):
    """A requester, and the epoch of the session that it speaks for."""

    requester: Requester
    epoch: int


Connect = Callable[[float], Connection]
"""Seconds to a connection; raises Unavailable, or another HotsetError where trying again is of no use."""


class RemoteArena:
    """One engine's; give it back with `close`, from the loop's thread."""

    def __init__(
        self,
        layout: ArenaLayout,
        connect: Connect,
        generations: Callable[[_Numbers], list[int]],
        seconds: float,
    ) -> None:
        """Connect when first needed.

        Args:
            layout: of the arena.
            connect: to the store's data plane, as the session that holds the pages.
            generations: the lives of pages `[n]` that the session holds.
            seconds: that each read, and the writes of a step, may take.
        """
        self.layout = layout
        self.seconds = seconds
        self._connect = connect
        self._generations = generations
        self._connection: Connection | None = None
        self._regions = {(region.plane, region.layer): region.number for region in regions_of(layout)}
        self._staged: list[tuple[Pieces, npt.NDArray[np.uint8]]] = []
        self._number = 0  # of the last write; never used again, because one given up may still be done

    def pieces(self, plane: str, layer: int, pages: _Numbers, offsets: _Numbers, size: int) -> Pieces:
        """`[n]` pieces of one size in one layer: `pages` and `offsets` `[n]`, the latter in bytes."""
        found = np.empty(len(pages), PIECE)
        known, which = np.unique(pages, return_inverse=True)
        found["page"], found["offset"], found["size"] = pages, offsets, size
        found["generation"] = np.array(self._generations(known), np.uint32)[which]
        found["region"] = self._regions[plane, layer]
        return found

    def open(self) -> tuple[str, ...]:
        """Connect now, so that a start finds out what does not work; the lanes that carry the bytes.

        Raises:
            HotsetError: as `read`.
        """
        return self._patiently(lambda connection, deadline: connection.requester.lanes)

    def read(self, pieces: Pieces) -> Tensor:
        """[bytes of all pieces] uint8, one behind the other.

        Raises:
            Unavailable: the store did not answer in time. HotsetError: it refuses.
        """
        sizes = pieces["size"].astype(np.int64)
        out = np.empty(int(sizes.sum()), np.uint8)
        if len(pieces):
            parts = _parts(sizes, _ANSWER_BYTES, _MOST_PIECES)
            ends = sizes.cumsum()
            self._patiently(
                lambda connection, deadline: _read(connection, deadline, pieces, parts, ends, out)
            )
        return torch.from_numpy(out)

    def stage(self, pieces: Pieces, data: Tensor) -> None:
        """Keep bytes, whatever their dtype, to be written by `settle`; no byte twice between two of them."""
        packed = data.detach().contiguous().view(-1).view(torch.uint8).numpy()
        self._staged.append((pieces, packed))

    def settle(self) -> None:
        """Write what was staged; all of it is in the arena when this returns.

        Raises:
            Unavailable: the store did not take it in time. HotsetError: it refuses. What was staged is gone.
        """
        if not self._staged:
            return
        staged, self._staged = self._staged, []
        pieces = np.concatenate([some for some, _ in staged])
        data = np.concatenate([packed for _, packed in staged])
        pieces = _cut(pieces, _PIECE_BYTES)
        sizes = pieces["size"].astype(np.int64)
        parts = deque(enumerate(_parts(sizes + PIECE.itemsize, _WRITE_BYTES, len(pieces)), self._number + 1))
        self._number += len(parts)
        ends = sizes.cumsum()

        def write(connection: Connection, deadline: float) -> None:
            requester = connection.requester
            while parts:
                number, (begin, end) = parts[0]
                own = data[ends[begin] - sizes[begin] : ends[end - 1]]
                body = write_request(connection.epoch, number, pieces[begin:end], own.data)
                with requester.wait(requester.submit(body, 0, deadline - time.monotonic())):
                    parts.popleft()

        self._patiently(write)

    def drop(self) -> None:
        """Forget what was staged."""
        self._staged.clear()

    def close(self) -> None:
        """Let go of the connection. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.requester.close()

    def _patiently(self, work: Callable[[Connection, float], _T]) -> _T:
        """Do `work` over a connection, and again over another one where it breaks, until time is up."""
        deadline = time.monotonic() + self.seconds
        tried = False
        try:
            while True:
                try:
                    if self._connection is None:
                        if tried:
                            time.sleep(max(0.0, min(_PAUSE_SECONDS, deadline - time.monotonic())))
                        self._connection = self._connect(max(0.001, deadline - time.monotonic()))
                        lanes = ",".join(self._connection.requester.lanes)
                        _log.info("store_connected lanes=%s epoch=%d", lanes, self._connection.epoch)
                    return work(self._connection, deadline)
                except Unavailable as error:
                    # A refusal of that class ends no connection, but it is not worth telling them apart.
                    self.close()
                    tried = True
                    if time.monotonic() >= deadline:
                        raise Unavailable(
                            f"the store did not answer within {self.seconds:g} s ({error}); "
                            "send the request again"
                        ) from error
                    _log.warning("store_lost error=%s", error)
        except (StateConflict, NotFound) as error:
            self.close()
            raise Unavailable(
                f"the store no longer has what was computed for this answer ({error}); send the request again"
            ) from error
        except BaseException:
            self.close()
            raise


def _read(
    connection: Connection,
    deadline: float,
    pieces: Pieces,
    parts: list[tuple[int, int]],
    ends: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8],
) -> None:
    """Ask for `parts` of the pieces, several at once, and put the answers into `out`."""
    requester, waiting = connection.requester, deque(parts)
    under_way: deque[tuple[int, int, Ticket]] = deque()
    while waiting or under_way:
        if waiting and len(under_way) < requester.capabilities.in_flight:
            begin, end = waiting.popleft()
            first = int(ends[begin]) - int(pieces["size"][begin])
            length = int(ends[end - 1]) - first
            body = read_request(pieces[begin:end])
            ticket = requester.submit(body, length, deadline - time.monotonic())
            under_way.append((first, length, ticket))
            continue
        first, length, ticket = under_way.popleft()
        with requester.wait(ticket) as payload:
            if len(payload) != length:
                raise Unavailable(f"the store answered {len(payload)} bytes where {length} were asked for")
            out[first : first + length] = np.frombuffer(payload, np.uint8)


def _parts(sizes: npt.NDArray[np.int64], most_bytes: int, most: int) -> list[tuple[int, int]]:
    """Runs (begin, end) of items that are `most_bytes` together at most, or one item alone."""
    if int(sizes.sum()) <= most_bytes and len(sizes) <= most:
        return [(0, len(sizes))]
    parts, begin, total = [], 0, 0
    for at, size in enumerate(sizes.tolist()):
        if at > begin and (total + size > most_bytes or at - begin >= most):
            parts.append((begin, at))
            begin, total = at, 0
        total += size
    parts.append((begin, len(sizes)))
    return parts


def _cut(pieces: Pieces, most_bytes: int) -> Pieces:
    """The same bytes in the same order, no piece longer than `most_bytes`."""
    counts = -(-pieces["size"].astype(np.int64) // most_bytes)
    if (counts == 1).all():
        return pieces
    cut = pieces.repeat(counts)
    nth = np.arange(len(cut)) - (counts.cumsum() - counts).repeat(counts)
    cut["offset"] += (nth * most_bytes).astype(np.uint32)
    cut["size"] = np.minimum(cut["size"] - (nth * most_bytes).astype(np.uint32), most_bytes)
    return cut
