"""The life of every host page: free, open, sealed; held or cached; the headers that say so after a kill.

Knows pages, holders (numbers) and hashes; neither sessions nor leases nor the wire nor a page's bytes.

    FREE   --allocate--> OPEN     generation + 1, owner = the holder, one reference
    OPEN   --seal------> SEALED   hash and parent; never written again
    OPEN   --drop------> FREE
    SEALED --last drop-> SEALED   cached: found by its hash until room is short
    SEALED --evict-----> FREE     only when cached; the one unused for longest first

Of several sealed pages with one hash the first is found; the others serve those who hold them and are free
after the last drop, unless the first is gone by then. A drop of such a twin counts as a use of the first.

A holder of a page holds those before it in the sequence, and of pages dropped by one call the deepest is the
stalest, so a page goes before its parent. Where a client dropped a parent earlier and the parent went first,
the page is not matched; it ages and goes in its turn, or is found again once the parent's hash is sealed.

Invariants, checked by `check_integrity`: a page is free, cached or held; an open page has one reference, its
owner's; reference counts are the sums of what the holders hold; a cached page is the one its hash finds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.contract.errors import HotsetError, StateConflict
from services.contract.page_header import NO_PAGE
from services.kvstore.arena import PageHeaders
from services.kvstore.header_columns import FREE, OPEN, SEALED, HeaderColumns
from services.kvstore.holdings import Counts, Holdings
from services.kvstore.orders import PageCounts
from services.kvstore.page_refs import PageRefs
from services.kvstore.prefix_index import PrefixIndex
from services.kvstore.recency import Pages, Recency
from services.kvstore.seal_check import check_seals, not_held
from services.kvstore.seals import Seals

THE_STORE, THE_PULLER = 0, 1
"""No sessions: who holds sealed pages of a reopened arena until they are claimed; who pages on their way."""


class PageTable:
    """Every page of one laid-out arena. Each method validates all it is given before it changes anything."""

    def __init__(self, headers: PageHeaders, index: PrefixIndex | None = None) -> None:
        """Take up what `headers` say: an open page is its owner's, a sealed one THE_STORE's.

        Raises:
            SetupError: a header is damaged.
        """
        self._headers = HeaderColumns(headers, nobody=THE_STORE)
        self.page_count = len(headers)
        self.freed = 0  # pages that became free since the table was made
        self.evicted = 0  # those of them that were cached
        # The page freed last is used first: it lies in memory already, so the arena stays small.
        self._free: Pages = np.empty(self.page_count, np.int64)
        free = np.flatnonzero(self._headers.state == FREE)[::-1]
        self._free_count = len(free)
        self._free[: len(free)] = free
        self._holdings = Holdings(self.page_count)
        self._recency = Recency(self.page_count)
        self._index = PrefixIndex() if index is None else index
        self._found = np.zeros(self.page_count, np.bool_)  # whether a page is the one its hash finds
        opened = np.flatnonzero(self._headers.state == OPEN)
        self._open_count = len(opened)
        for owner in np.unique(self._headers.owner[opened]).tolist():
            self._holdings.add(owner, opened[self._headers.owner[opened] == owner])
        sealed = np.flatnonzero(self._headers.state == SEALED)
        self._depth = self._headers.depths(sealed)
        self._depth_one: memoryview = self._depth.data  # of single pages, as in recency.py
        self._enter(sealed)
        self._holdings.add(THE_STORE, sealed)

    @property
    def counts(self) -> PageCounts:
        """How many pages are in which state, now."""
        free, cached = self._free_count, len(self._recency)
        return PageCounts(
            total=self.page_count,
            free=free,
            open=self._open_count,
            sealed=self.page_count - free - cached - self._open_count,
            cached=cached,
        )

    def holders(self) -> list[int]:
        """Everyone who holds a page."""
        return list(self._holdings.holders())

    def held_by(self, holder: int) -> int:
        """References that `holder` holds."""
        return self._holdings.total(holder)

    def known(self, page_hashes: Sequence[bytes]) -> int:
        """How many hashes at the beginning of a chain are found."""
        return len(self._index.longest(page_hashes))

    def match(self, holder: int, page_hashes: Sequence[bytes]) -> PageRefs:
        """Give `holder` a reference to each page of the longest sealed prefix of a chain without repeats."""
        pages = np.array(self._index.longest(page_hashes), np.int64)
        self._recency.remove(pages[self._holdings.references[pages] == 0])
        self._holdings.add(holder, pages)
        return PageRefs(pages, self._headers.generation[pages])

    def update(self, holder: int, releases: PageRefs, seals: Seals, wanted: int) -> PageRefs | None:
        """Release, then seal, then allocate for `holder`; cached pages are evicted where free ones are short.

        Returns:
            `wanted` new open pages, or None where there is no room for so many; the rest is done even then.

        Raises:
            InvalidRequest, StaleReference, StateConflict: a release or a seal is impossible; nothing is done.
        """
        pages, counts = self.check_held(holder, releases)
        check_seals(seals, self._headers, self._holdings.of(holder), pages, counts)
        self._drop(holder, pages, counts)
        self._seal(seals)
        return self._allocate(holder, wanted)

    def adopt(self, holder: int, held: PageRefs) -> PageRefs:
        """Make `held`, one item a reference, all that `holder` holds: a client takes its session up again.

        It may name what the table says is the holder's, and sealed pages that THE_STORE keeps for claims.

        Returns:
            Those of the pages that are sealed, each once.

        Raises:
            InvalidRequest, StaleReference, StateConflict: a page is not the holder's; nothing is done.
        """
        self._headers.check_live(held)
        pages, counts = held.counted()
        before = self._holdings.of(holder)[pages]
        bad = (counts > before) & (self._holdings.of(THE_STORE)[pages] == 0)
        if bad.any():
            page = int(pages[bad.argmax()])
            raise StateConflict(
                f"page {page} is claimed {int(counts[bad.argmax()])} times and the session holds it "
                f"{int(self._holdings.of(holder)[page])} times; attach with a new token and compute it again"
            )
        more = counts > before
        self._holdings.add(holder, pages[more], counts[more] - before[more])
        surplus = self._holdings.of(holder).copy()
        surplus[pages] -= counts
        dropped = np.flatnonzero(surplus)
        self._drop(holder, dropped, surplus[dropped])
        sealed = pages[self._headers.state[pages] == SEALED]
        return PageRefs(sealed, self._headers.generation[sealed])

    def release_all(self, holder: int) -> int:
        """Give back everything that `holder` holds; the references given back."""
        total = self._holdings.total(holder)
        if total:
            counts = self._holdings.of(holder)
            pages = np.flatnonzero(counts)
            self._drop(holder, pages, counts[pages])
        self._holdings.forget(holder)
        return total

    def check_integrity(self) -> None:
        """Compare everything with everything.

        Raises:
            HotsetError: the table or the headers contradict themselves.
        """
        self._holdings.check_integrity()
        references = self._holdings.references
        is_open, sealed = self._headers.state == OPEN, self._headers.state == SEALED
        free = self._free[: self._free_count]
        self._recency.check_integrity(sealed & (references == 0))
        hashes = self._headers.hashes(np.arange(self.page_count))
        finds = np.array([bool(h) and self._index.get(h) == page for page, h in enumerate(hashes)])
        for broken, what in (
            (len(free) != len(np.unique(free)), "a page is free twice"),
            (
                not np.array_equal(np.sort(free), np.flatnonzero(self._headers.state == FREE)),
                "the free list is not the pages whose header says free",
            ),
            (references[free].any(), "a free page is held"),
            (is_open.sum() != self._open_count, "open pages are miscounted"),
            ((references[is_open] != 1).any(), "an open page is shared or unheld"),
            (
                any(
                    self._holdings.of(int(self._headers.owner[page]))[page] != 1
                    for page in np.flatnonzero(is_open)
                ),
                "an open page's owner is wrong",
            ),
            ((self._found & ~finds).any(), "a page is not found by its hash"),
            (self._found.sum() != len(self._index), "a hash finds a page that has another"),
            ((self._found & ~sealed).any(), "a page is found that is not sealed"),
            ((sealed & (references == 0) & ~self._found).any(), "a page is cached that nothing finds"),
        ):
            if broken:
                raise HotsetError(f"page table: {what}")

    def _enter(self, pages: Pages) -> None:
        """Let hashes find sealed `pages`, where none finds another page already."""
        for page, page_hash in zip(pages.tolist(), self._headers.hashes(pages), strict=True):
            self._found[page] = self._index.add(page_hash, page)

    def check_held(self, holder: int, releases: PageRefs) -> tuple[Pages, Counts]:
        """Pages, all held by `holder` as often as they stand there: each once, how often; from any thread."""
        self._headers.check_live(releases)
        pages, counts = releases.counted()
        held = self._holdings.of(holder)[pages]
        lacking = counts > held
        if lacking.any():
            raise not_held(int(pages[lacking.argmax()]), int(held[lacking.argmax()]))
        return pages, counts

    def _seal(self, seals: Seals) -> None:
        if not len(seals):
            return
        self._headers.seal(seals)
        self._open_count -= len(seals)
        pages, depth = seals.pages.pages, self._depth_one
        for page, parent in zip(pages.tolist(), seals.parents.pages.tolist(), strict=True):
            depth[page] = 0 if parent == NO_PAGE else depth[parent] + 1  # which this call may have set
        self._found[pages] = list(map(self._index.add, seals.page_hashes, pages.tolist()))

    def _allocate(self, holder: int, wanted: int) -> PageRefs | None:
        lacking = wanted - self._free_count
        if lacking > len(self._recency):
            return None
        if lacking > 0:
            self._evict(lacking)
        self._free_count -= wanted
        pages = self._free[self._free_count : self._free_count + wanted][::-1].copy()
        generations = self._headers.open(pages, holder)
        self._open_count += wanted
        self._holdings.add(holder, pages)
        return PageRefs(pages, generations)

    def _evict(self, count: int) -> None:
        pages = self._recency.stalest(count)
        self._recency.remove(pages)
        for page_hash in self._headers.hashes(pages):
            self._index.remove(page_hash)
        self._found[pages] = False
        self.evicted += count
        self._free_pages(pages)

    def _drop(self, holder: int, pages: Pages, counts: Counts) -> None:
        """Take references from `holder`; what nobody holds any more becomes free, or cached if sealed."""
        if not len(pages):
            return
        lost = self._holdings.take(holder, pages, counts)
        is_sealed = self._headers.state[lost] == SEALED
        opened, sealed = lost[~is_sealed], lost[is_sealed]
        self._open_count -= len(opened)
        self._free_pages(opened)
        found = self._found[sealed]
        twins = sealed[~found]
        cached = sealed[found]
        if len(twins):
            self._enter(twins)
            entered = self._found[twins]
            firsts = np.unique(
                [self._index.get(page_hash) or 0 for page_hash in self._headers.hashes(twins[~entered])]
            )
            firsts = firsts.astype(np.int64)
            cached = np.concatenate([cached, twins[entered]])
            used = np.setdiff1d(firsts[self._holdings.references[firsts] == 0], cached)
            self._recency.remove(used)
            self._free_pages(twins[~entered])
            cached = np.concatenate([cached, used])
        deepest_first = np.lexsort((cached, -self._depth[cached].astype(np.int64)))
        self._recency.append(cached[deepest_first])

    def _free_pages(self, pages: Pages) -> None:
        self._headers.free(pages)
        self._free[self._free_count : self._free_count + len(pages)] = pages
        self._free_count += len(pages)
        self.freed += len(pages)
