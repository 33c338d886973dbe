"""Reads and writes pieces of pages for decoders that cannot map the arena: only of pages that they hold.

Knows the store's parts. Reads run in a responder's thread, as page_source.py's: a page is checked before its
bytes are copied **and after**. Writes run in the event loop's turn, where no page changes hands, so one that
was found to be open and the session's is so until its bytes are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from services.contract.errors import InvalidRequest, NotFound, StaleReference, StateConflict
from services.contract.page_header import PageState
from services.contract.slot_request import Pieces, Write, pieces_to_read, pieces_to_write
from services.contract.transport.protocol import Request
from services.kvstore.page_refs import PageRefs
from services.kvstore.slot_bytes import SlotBytes
from services.kvstore.store_parts import StoreParts

_T = TypeVar("_T")


class Turn(Protocol):
    """Has something done while nothing else of the store happens, as turns.py does it."""

    def __call__(self, work: Callable[[], _T]) -> _T:
        """What it returns or raises."""


class SlotDesk:
    """Behind a store's responders."""

    def __init__(self, parts: StoreParts, turn: Turn) -> None:
        self._parts = parts
        self._turn = turn
        self._bytes: SlotBytes | None = None
        self._done: dict[int, tuple[int, int]] = {}  # a session's epoch, and its last write in it
        self.read_pieces = self.written_pieces = 0

    def read(self, request: Request, out: memoryview) -> int:
        """Answer a request to read.

        Raises:
            InvalidRequest: there are no such pieces, or they are too long for `out`.
            NotFound, StaleReference, StateConflict: the session does not hold the pages, or not in this life.
        """
        pieces = pieces_to_read(request.body)
        layed_out = self._slot_bytes()
        length = layed_out.check(pieces)
        if length > len(out):
            raise InvalidRequest(f"pieces of {length} bytes were asked for and there is room for {len(out)}")
        refs = _pages_of(pieces)
        self._check(request.session, refs)
        layed_out.gather(pieces, out)
        self._check(request.session, refs)
        self.read_pieces += len(pieces)
        return length

    def write(self, request: Request) -> int:
        """Answer a request to write; its bytes are in the arena when this returns. Always 0.

        Raises:
            InvalidRequest: there are no such pieces.
            NotFound, StaleReference, StateConflict: a page is not the session's own, not in this life, or
                sealed; or the write is of an earlier epoch. Nothing is written.
        """
        write = pieces_to_write(request.body)
        self._turn(lambda: self._write(request.session, write))
        return 0

    def _write(self, number: int, write: Write) -> None:
        session = self._parts.sessions.get(number)
        if session is None:
            raise NotFound(f"session {number:016x} is over")
        if session.epoch != write.epoch:
            raise StaleReference(f"the session is at epoch {session.epoch}, the write is of {write.epoch}")
        epoch, last = self._done.get(number, (0, 0))
        if epoch != session.epoch:
            last = 0
        if write.number <= last:
            return  # done already, or given up and overtaken
        layed_out = self._slot_bytes()
        layed_out.check(write.pieces)
        refs = _pages_of(write.pieces)
        self._check(number, refs)
        shut = self._parts.arena.page_headers()["state"][refs.pages] != int(PageState.OPEN)
        if shut.any():
            raise StateConflict(f"page {int(refs.pages[shut.argmax()])} is sealed, and never written again")
        layed_out.scatter(write.pieces, write.data)
        self._note(number, session.epoch, write.number)
        self.written_pieces += len(write.pieces)

    def _note(self, number: int, epoch: int, last: int) -> None:
        if number not in self._done:
            living = self._parts.sessions.numbers()
            self._done = {one: done for one, done in self._done.items() if one in living}
        self._done[number] = epoch, last

    def _check(self, session: int, refs: PageRefs) -> None:
        if self._parts.sessions.get(session) is None:
            raise NotFound(f"session {session:016x} is over")
        self._parts.space.table.check_held(session, refs)

    def _slot_bytes(self) -> SlotBytes:
        layout = self._parts.arena.layout
        if layout is None:
            raise StateConflict("the arena is not laid out")
        if self._bytes is None or self._bytes.layout is not layout:
            self._bytes = SlotBytes(self._parts.arena.buffer, layout)
        return self._bytes


def _pages_of(pieces: Pieces) -> PageRefs:
    """The pages that pieces lie in, each once."""
    keys = np.unique(pieces["page"].astype(np.uint64) << np.uint64(32) | pieces["generation"])
    return PageRefs((keys >> np.uint64(32)).astype(np.int64), keys.astype(np.uint32))
