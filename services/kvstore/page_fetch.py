"""Pulls pages of a peer into this store's arena: a few MB a request, several under way, in order.

Knows requesters, page bytes and a deadline; neither which pages are worth it nor what becomes of them. It
belongs to one thread, because requesters do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from services.contract.errors import HotsetError
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import MAX_REPLY_BYTES, MAX_REQUEST_BYTES, Credentials
from services.contract.transport.protocol import Requester, Ticket
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_refs import PageRefs
from services.kvstore.page_request import write_request
from services.kvstore.recency import Pages

REQUEST_BYTES = 4 * 2**20
"""Of one answer, unless a page is longer."""
_BATCH_REQUESTS = 8  # two rounds of a requester's credits
_REQUEST_PAGES = MAX_REQUEST_BYTES // 8 - 1


@dataclass(frozen=True, slots=True)
class Face:
    """Where a peer answers, and as whom it knows us; equal faces may share a connection."""

    peer: str  # its address for gRPC, the same in every life of it
    address: bytes
    credentials: Credentials


class Fetched(NamedTuple):
    """The first `pages` pages have arrived whole; what was wrong, if it was not the time alone."""

    pages: int
    error: HotsetError | None


Connect = Callable[[Face, float], Requester]
"""(face, seconds) to a requester; raises TransportFault or SetupError."""


def batch_pages(page_bytes: int) -> int:
    """Pages to fetch by one call: enough to keep a lane busy, and few enough to hold open for that."""
    return _BATCH_REQUESTS * _pages_of_request(page_bytes)


class PageFetcher:
    """Keeps one connection a peer."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._requesters: dict[str, tuple[Face, Requester]] = {}
        self.lanes: tuple[str, ...] = ()  # of the connections there are; replaced, never changed

    def fetch(
        self, face: Face, refs: PageRefs, into: PageBytes, pages: Pages, last_start: float, deadline: float
    ) -> Fetched:
        """Pull what `refs` name at the peer into `pages` here, which nobody reads or writes.

        A connection that had lain idle may be stale: it is made anew once. Never raises a HotsetError.

        Args:
            face: where the peer answers, and as whom.
            refs: as many as `pages`.
            into: this store's arena.
            pages: of this store, open and held for this.
            last_start: monotonic, seconds; nothing is asked for from then on, so that all ends in good order.
            deadline: likewise; of the answers.
        """
        if into.page_bytes > MAX_REPLY_BYTES:
            return Fetched(0, TransportFault(Fault.LENGTH, f"a page of {into.page_bytes} bytes is too long"))
        for again in (False, True):
            used = face.peer in self._requesters
            fetched = self._try(face, refs, into, pages, last_start, deadline)
            if fetched.error is None or fetched.pages or not used or again:
                break
        return fetched

    def close(self) -> None:
        """Let go of every connection."""
        self.keep(())

    def keep(self, peers: Collection[str]) -> None:
        """Let go of the connections to all but these peers."""
        for peer in self._requesters.keys() - peers:
            self.drop(peer)

    def drop(self, peer: str) -> None:
        """Let go of the connection to a peer, if there is one."""
        kept = self._requesters.pop(peer, None)
        if kept is not None:
            kept[1].close()
            self._note_lanes()

    def _try(
        self, face: Face, refs: PageRefs, into: PageBytes, pages: Pages, last_start: float, deadline: float
    ) -> Fetched:
        count = 0
        try:
            requester = self._requester(face, deadline)
            at_once = _pages_of_request(into.page_bytes)
            starts = deque(range(0, len(refs), at_once))
            under_way: deque[tuple[int, int, Ticket]] = deque()
            while starts or under_way:
                if time.monotonic() > last_start:
                    starts.clear()
                if starts and len(under_way) < requester.capabilities.in_flight:
                    start = starts.popleft()
                    end = min(start + at_once, len(refs))
                    part = PageRefs(refs.pages[start:end], refs.generations[start:end])
                    room = (end - start) * into.page_bytes
                    ticket = requester.submit(write_request(part), room, deadline - time.monotonic())
                    under_way.append((start, end, ticket))
                    continue
                if not under_way:
                    break
                start, end, ticket = under_way.popleft()
                with requester.wait(ticket) as packed:
                    into.unpack(pages[start:end], packed)
                count = end
        except HotsetError as error:
            self.drop(face.peer)  # whatever else was under way is of no use any more
            return Fetched(count, error)
        return Fetched(count, None)

    def _requester(self, face: Face, deadline: float) -> Requester:
        kept = self._requesters.get(face.peer)
        if kept is not None and kept[0] == face:
            return kept[1]
        self.drop(face.peer)
        requester = self._connect(face, deadline - time.monotonic())
        self._requesters[face.peer] = (face, requester)
        self._note_lanes()
        return requester

    def _note_lanes(self) -> None:
        self.lanes = tuple(sorted({lane for _, made in self._requesters.values() for lane in made.lanes}))


def _pages_of_request(page_bytes: int) -> int:
    return min(_REQUEST_PAGES, max(1, REQUEST_BYTES // page_bytes))
