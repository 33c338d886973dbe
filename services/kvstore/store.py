"""The store: every decision a client's call comes to. The servicer translates, this decides.

Knows arena, pages and sessions; neither gRPC nor Prometheus. All of it belongs to one event loop (or one
test): no method waits, none is called from another thread, so there are no locks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.contract.errors import StateConflict
from services.kvstore.arena import Arena
from services.kvstore.orders import (
    Attached,
    AttachOrder,
    ClientKind,
    PageCounts,
    Updated,
    UpdateOrder,
    check_chain,
    check_tokens,
)
from services.kvstore.page_news import NO_NEWS, PageNews
from services.kvstore.page_refs import PageRefs
from services.kvstore.page_space import PageSpace
from services.kvstore.session_locks import SessionLocks
from services.kvstore.sessions import Clock, Session, SessionEnd, Sessions, session_id_of
from services.kvstore.sizes import StoreSizes
from services.kvstore.snapshot import StoreCounters, StoreSnapshot
from services.kvstore.store_parts import StoreParts

_log = logging.getLogger(__name__)


class Store:
    """An arena and everyone attached to it; build one with `Store.open`, call `tick` a few times a second."""

    def __init__(
        self, arena: Arena, locks: SessionLocks, clock: Clock, lease_seconds: float, news: PageNews
    ) -> None:
        """Take up what the arena holds.

        Raises:
            SetupError: a page header is damaged.
        """
        self._arena = arena
        self._locks = locks
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._sessions = Sessions(locks, clock, lease_seconds)
        self._counters = StoreCounters()
        self._news = news
        self._space = PageSpace(arena, locks, clock, lease_seconds, news)
        self.parts = StoreParts(arena, self._space, self._sessions)
        self.draining = False

    @classmethod
    def open(
        cls, directory: Path, arena_bytes: int, clock: Clock, lease_seconds: float, news: PageNews = NO_NEWS
    ) -> Store:
        """Make or reopen the arena in `directory`; `news` is told what becomes findable.

        Raises:
            SetupError: as `Arena.open`; or a page header is damaged. What was there is left as it was.
        """
        arena = Arena.open(directory, arena_bytes)
        try:
            return cls(arena, SessionLocks(arena.path.parent / "sessions"), clock, lease_seconds, news)
        except BaseException:
            arena.close(keep=arena.reopened)
            raise

    @property
    def reopened(self) -> bool:
        """Whether the arena was there before."""
        return self._arena.reopened

    @property
    def page_counts(self) -> PageCounts:
        """Pages by state, now."""
        return self._space.counts

    def attach(self, order: AttachOrder) -> Attached:
        """Open a session or take one up again.

        Raises:
            InvalidRequest: the order is impossible.
            StateConflict: draining; the client holds no lock; an older client of this name lives; the token
                is of another client; or others hold pages of another geometry or model.
            StaleReference: a page in `held` is of an earlier life.
            SetupError: not one page of this geometry fits the arena.
        """
        order.check()
        session_id = session_id_of(order.token)
        if self.draining and self._sessions.get(session_id) is None:
            raise StateConflict("the store is draining and takes no new session; attach to its successor")
        self.tick()
        if order.kind is ClientKind.MAPPED and self._locks.reap(order.token):
            raise StateConflict(
                f"nobody holds the lock sessions/{order.token}.lock beside the arena; lock it, then attach"
            )
        self._sessions.check_identity(order)
        leaving = self._sessions.in_the_way(order, anew=self._arena.header != order.header)
        if order.reads_only:
            self._space.check_layout(order.header)
        table = self._space.table_for(
            order.header,
            claims=len(order.held) > 0,
            attached=self._sessions.numbers(),
            leaving={session.session_id for session in leaving},
        )
        sealed = table.adopt(session_id, order.held)
        for session in leaving:  # only now: an attach that is refused changes nothing
            self._end(session, SessionEnd.REPLACED)
        self._space.claim(session_id)
        session = self._sessions.open(order.client_name, order.kind, order.token, self._arena.next_epoch())
        session.reads_only = order.reads_only
        self._counters.attaches += 1
        _log.info(
            "attach client=%s kind=%s session=%016x epoch=%d held=%d",
            session.client_name,
            session.kind.value,
            session_id,
            session.epoch,
            len(order.held),
        )
        return Attached(
            session_id=session_id,
            epoch=session.epoch,
            arena_path=str(self._arena.path),
            arena_bytes=self._arena.arena_bytes,
            page_count=table.page_count,
            lease_ms=int(self._lease_seconds * 1000),
            sealed=sealed,
            data_key=session.data_key,
        )

    def update(self, session_id: int, epoch: int, order: UpdateOrder) -> Updated:
        """One step's releases, seals and allocations; a repeated sequence number gets the first answer again.

        Raises:
            NotFound, StaleReference: the session is over, or of another epoch.
            StateConflict: the sequence number is old or skips one, or pages are wanted of a draining store.
            InvalidRequest, StaleReference, StateConflict: a page is not the session's; nothing is done.
        """
        session = self._speaking(session_id, epoch)
        if session.last_answer is not None and order.sequence == session.last_sequence:
            return session.last_answer
        if order.sequence != session.last_sequence + 1:
            raise StateConflict(
                f"update {order.sequence} does not follow {session.last_sequence}; number updates 1, 2, 3 ..."
            )
        if self.draining and order.allocate_pages:
            raise StateConflict("the store is draining and allocates no pages; give up or finish what runs")
        table = self._space.table
        with self._news.naming(order.seals, self._arena.page_headers):
            pages = table.update(session_id, order.releases, order.seals, order.allocate_pages)
        self._counters.sealed += len(order.seals)
        counts = table.counts
        if pages is None:
            self._counters.refused += order.allocate_pages
            shortfall = order.allocate_pages - counts.free - counts.cached
        else:
            self._counters.allocated += order.allocate_pages
            shortfall = 0
        session.last_sequence = order.sequence
        session.last_answer = Updated(
            PageRefs.of(()) if pages is None else pages, shortfall, counts.free, counts.cached
        )
        return session.last_answer

    def match(self, session_id: int, epoch: int, page_hashes: Sequence[bytes], tokens: bytes) -> PageRefs:
        """Pin the longest sealed prefix of a chain: a reference to each page of it is the session's.

        Raises:
            NotFound, StaleReference: the session is over, or of another epoch.
            InvalidRequest: one of the hashes is none, or stands there twice; or a token is cut.
        """
        session = self._speaking(session_id, epoch)
        check_chain(page_hashes)
        check_tokens(tokens)
        pages = self._space.match(session_id, page_hashes, tokens)
        if not session.reads_only:  # else the miss is another store's, and counted there
            self._counters.looked_up += len(page_hashes)
            self._counters.matched += len(pages)
        return pages

    def known(self, session_id: int, epoch: int, page_hashes: Sequence[bytes]) -> int:
        """How many hashes at the beginning of a chain are found; nothing is pinned.

        Raises:
            As `match`.
        """
        self._speaking(session_id, epoch)
        check_chain(page_hashes)
        return self._space.table.known(page_hashes)

    def heartbeat(self, session_id: int, epoch: int) -> int:
        """Renew the lease; its length in ms.

        Raises:
            NotFound, StaleReference: the session is over, or of another epoch.
        """
        self._speaking(session_id, epoch)
        return int(self._lease_seconds * 1000)

    def detach(self, session_id: int, epoch: int) -> int:
        """End a session; the references that came back.

        Raises:
            NotFound, StaleReference: the session is over, or of another epoch.
        """
        return self._end(self._speaking(session_id, epoch), SessionEnd.DETACHED)

    def drain(self) -> int:
        """Take no new session, allocate no page from now on; the clients attached that do more than read."""
        if not self.draining:
            self.draining = True
            _log.info("drain sessions=%d", len(self._sessions))
        return self._sessions.working()

    def tick(self) -> None:
        """End the sessions that are over and give their pages back; a few times a second."""
        over, silent = self._sessions.overdue()
        for session, reason in over:
            self._end(session, reason)
        for session in silent:
            self._counters.mapped_leases += 1
            _log.warning(
                "lease_expired client=%s session=%016x pages=kept", session.client_name, session.session_id
            )
        self._space.tick(self._sessions.numbers())

    def snapshot(self) -> StoreSnapshot:
        """What the store holds, now."""
        layout = self._arena.layout
        return StoreSnapshot(
            arena_path=str(self._arena.path),
            arena_bytes=self._arena.arena_bytes,
            resident_bytes=self._arena.resident_bytes,
            page_bytes=layout.page_bytes if layout else 0,
            page_tokens=layout.page_tokens if layout else 0,
            pages=self._space.counts,
            sessions={kind: self._sessions.count(kind) for kind in ClientKind},
            expired_sessions=self._sessions.expired(),
            unclaimed_sessions=self._space.unclaimed,
            recovering=self._space.recovering,
            draining=self.draining,
            freed_pages=self._space.freed,
            evicted_pages=self._space.evicted,
            counters=replace(self._counters, ended=dict(self._counters.ended)),
        )

    def sizes(self) -> StoreSizes:
        """What the settings came to on this machine."""
        return StoreSizes.of(self._arena.path, self.snapshot())

    def check_integrity(self) -> None:
        """Compare everything with everything; for idle times and tests.

        Raises:
            HotsetError: the store contradicts itself.
        """
        self._space.check_integrity(self._sessions.numbers())

    def close(self, *, keep: bool) -> None:
        """Let go of the arena; remove it and everything beside it unless `keep`."""
        if not keep:
            self._locks.remove()
        self._arena.close(keep=keep)

    def _speaking(self, session_id: int, epoch: int) -> Session:
        session = self._sessions.get(session_id)
        if session is not None and session.kind is ClientKind.REMOTE and self._clock() >= session.deadline:
            self._end(session, session.lapse)
        session = self._sessions.authorise(session_id, epoch)
        self._sessions.renew(session)
        return session

    def _end(self, session: Session, reason: SessionEnd) -> int:
        self._sessions.remove(session)
        returned = self._space.table.release_all(session.session_id)
        self._counters.ended[reason] += 1
        _log.info(
            "session_end client=%s session=%016x reason=%s returned=%d",
            session.client_name,
            session.session_id,
            reason.value,
            returned,
        )
        return returned
