"""The arena's pages as one thing, laid out yet or not, waiting for clients of an earlier life or not.

Knows arena, table and recovery, and how many clients are attached only when told.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.contract.errors import HotsetError, StaleReference, StateConflict
from services.contract.file_header import FileHeader
from services.kvstore.arena import Arena
from services.kvstore.orders import PageCounts
from services.kvstore.page_news import PageNews
from services.kvstore.page_refs import PageRefs
from services.kvstore.pages import THE_PULLER, PageTable
from services.kvstore.prefix_index import PrefixIndex
from services.kvstore.recovery import Recovery
from services.kvstore.session_locks import SessionLocks
from services.kvstore.sessions import Clock

_log = logging.getLogger(__name__)


class PageSpace:
    """Owns the table of the arena's present layout."""

    def __init__(
        self, arena: Arena, locks: SessionLocks, clock: Clock, grace_seconds: float, news: PageNews
    ) -> None:
        """Take up what the arena holds.

        Raises:
            SetupError: a page header is damaged.
        """
        self._arena = arena
        self._news = news
        self._freed_before = 0  # in earlier layouts
        self._evicted_before = 0
        self._table: PageTable | None = None
        self._recovery: Recovery | None = None
        if arena.layout is not None:
            self._table = PageTable(arena.page_headers(), PrefixIndex(news))
            self._recovery = Recovery(self._table, locks, clock, grace_seconds)

    @property
    def table(self) -> PageTable:
        """The table; there is one as soon as a client has attached.

        Raises:
            StateConflict: the arena is not laid out yet.
        """
        if self._table is None:
            raise StateConflict("the arena is not laid out; attach first")
        return self._table

    @property
    def counts(self) -> PageCounts:
        """How many pages are in which state; all 0 before the first layout."""
        return self._table.counts if self._table else PageCounts()

    @property
    def freed(self) -> int:
        """Pages that became free since the process started."""
        return self._freed_before + (self._table.freed if self._table else 0)

    @property
    def evicted(self) -> int:
        """Pages that became free because room was short, since the process started."""
        return self._evicted_before + (self._table.evicted if self._table else 0)

    @property
    def recovering(self) -> bool:
        """Whether pages of an earlier life still wait for their clients."""
        return self._recovery is not None

    @property
    def unclaimed(self) -> int:
        """Mapped clients of an earlier life that live and have not attached again."""
        return self._recovery.living if self._recovery else 0

    def match(self, holder: int, page_hashes: Sequence[bytes], tokens: bytes) -> PageRefs:
        """Pin the longest sealed prefix of a chain; `tokens`, 4 bytes each, tell what of it is news.

        Raises:
            StateConflict: as `table`.
        """
        pages = self.table.match(holder, page_hashes)
        assert self._arena.header is not None, "a table has a layout"
        self._news.matched(page_hashes[: len(pages)], tokens, self._arena.header.page_tokens)
        return pages

    def table_for(
        self, header: FileHeader, *, claims: bool, attached: set[int], leaving: set[int]
    ) -> PageTable:
        """The table of an arena laid out as `header` says; laid out anew if nobody needs the old layout.

        Args:
            header: planes, page size and model of a client that attaches.
            claims: it says that it holds pages already.
            attached: session numbers of the attached clients.
            leaving: those of them whose sessions end with this attach; so do their holds on pages.

        Raises:
            StaleReference: its pages are of another layout.
            StateConflict: others need the present layout.
            InvalidRequest, SetupError: no page of this geometry fits.
        """
        if self._table is not None and self._arena.header == header:
            return self._table
        if claims:
            raise StaleReference(
                "the arena is not laid out as it was when this client's pages were allocated; "
                "attach with a new token and compute them again"
            )
        held = self._table is not None and not leaving.issuperset(self._table.holders())
        if attached - leaving or held or self.unclaimed:
            raise StateConflict(
                "the arena is laid out for other planes, page size or model; "
                f"{len(attached - leaving)} clients are attached, {self.unclaimed} have yet to come back and "
                f"{self.counts.held} pages are held; "
                "stop those clients first, or start another kvstore"
            )
        layout = self._arena.lay_out(header)
        # With the old layout its pages are gone; nobody who stays held one.
        self._freed_before = self.freed + self.counts.cached + self.counts.held
        self._evicted_before = self.evicted
        self._table = PageTable(self._arena.page_headers(), PrefixIndex(self._news))
        self._recovery = None
        _log.info(
            "layout pages=%d page_bytes=%d page_tokens=%d arena_bytes=%d",
            layout.page_count,
            layout.page_bytes,
            layout.page_tokens,
            layout.arena_bytes,
        )
        return self._table

    def check_layout(self, header: FileHeader) -> None:
        """Refuse a client that reads only, unless the arena is laid out as `header` says already.

        Raises:
            StateConflict: it is not.
        """
        if self._table is None or self._arena.header != header:
            raise StateConflict("the arena is not laid out for these planes, page size and model")

    def claim(self, session_id: int) -> None:
        """The client of this session has attached."""
        if self._recovery is not None:
            self._recovery.claim(session_id)

    def tick(self, attached: set[int]) -> None:
        """Give back what clients of an earlier life do not claim.

        Args:
            attached: session numbers of the attached clients.
        """
        if self._recovery is not None and self._recovery.tick(attached):
            self._recovery = None
            _log.info("recovered held=%d cached=%d", self.counts.held, self.counts.cached)

    def check_integrity(self, attached: set[int]) -> None:
        """Compare everything with everything.

        Raises:
            HotsetError: the pages contradict themselves or the sessions.
        """
        if self._table is None:
            return
        self._table.check_integrity()
        if self._recovery is None and not set(self._table.holders()) <= attached | {THE_PULLER}:
            raise HotsetError("page space: pages are held for a session that is not attached")
