"""Fetches from other stores what a match would miss: their prefix caches, a hash at a time, best effort.

Knows the store's parts, links to peers and a fetcher. A peer's word on what it has is worth a try, no more:
what counts is what arrives, compared, in the generation that the peer pinned. Pages on their way are
THE_PULLER's, open and found by no hash; those that have arrived whole are sealed and cached, as if computed
here. What a fault leaves half done is freed, and the next match goes on behind the pages that had arrived.
Room is made as they come, a batch at a time: a slow peer costs this store's own cache no more than it gives.

One pull at a time: a second one for the same prompt finds the pages of the first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from services.contract.errors import HotsetError
from services.kvstore.asked import Asked
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_fetch import PageFetcher, batch_pages
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.pages import THE_PULLER, PageTable
from services.kvstore.peer_link import PeerLink
from services.kvstore.peer_links import PeerLinks
from services.kvstore.seals import NO_SEALS, Seal, Seals
from services.kvstore.store_parts import StoreParts

_log = logging.getLogger(__name__)
_ASKING = 0.7  # of the time; no page is asked for in the rest, which is for those under way
_RANKING = 0.3  # of the time, for asking several peers how much they have
_RELEASE_SECONDS = 2.0
_NOTHING = PageRefs.of(())
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


@dataclass(slots=True)
class PullCounters:
    """What has happened since the process started; each only grows."""

    pages: int = 0  # arrived whole
    failures: int = 0  # pulls that ended early
    empty: int = 0  # peers asked that had nothing


class Peers:
    """Of one event loop, and one thread for the bytes."""

    def __init__(
        self,
        parts: StoreParts,
        links: PeerLinks,
        transport: str,
        fetcher: PageFetcher,
        seconds: float,
    ) -> None:
        """Ask the stores behind `links`, which it closes, by `transport`, for `seconds` a match at most."""
        self._parts = parts
        self._links = links
        self._transport = transport
        self._fetcher = fetcher
        self._seconds = seconds
        self._asked = Asked()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "page-fetch")
        self.counters = PullCounters()

    async def fill(self, page_hashes: Sequence[bytes]) -> None:
        """Have what peers know of a chain here, as far as that succeeds in time. Raises no HotsetError."""
        if self._missing(page_hashes) is None:
            return
        # A client that hangs up must not end it: the thread may be writing pages that are held for it.
        await asyncio.shield(self._go(self._fill(page_hashes, time.monotonic() + self._seconds)))

    async def follow(self, addresses: Sequence[str]) -> None:
        """Ask the stores at these addresses from the next pull on, beside those that the settings name."""
        async with self._turn:
            await self._links.follow(addresses)
            await self._in_thread(self._fetcher.keep, self._links.addresses)

    @property
    def count(self) -> int:
        """Stores that may be asked."""
        return len(self._links)

    async def close(self) -> None:
        """Wait for what is under way, which its deadline bounds, and hang up."""
        while self._tasks:  # those that end may begin others
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._in_thread(self._fetcher.close)
        self._thread.shutdown()
        await self._links.close()

    def _missing(self, page_hashes: Sequence[bytes]) -> int | None:
        """Where the chain leaves what is here; None if nobody need be asked."""
        if self._parts.arena.layout is None or not len(self._links):
            return None
        known = self._parts.space.table.known(page_hashes)
        if known == len(page_hashes) or self._asked.lately(page_hashes[known]):
            return None
        return known

    async def _fill(self, page_hashes: Sequence[bytes], deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._turn.acquire()
        except TimeoutError:
            return
        try:
            for link in await self._ranked(page_hashes, deadline):
                if self._missing(page_hashes) is None or time.monotonic() >= deadline:
                    return
                await self._pull(link, page_hashes, deadline)
            known = self._missing(page_hashes)
            if known is not None:
                self._asked.note(page_hashes[known])
        finally:
            self._turn.release()

    async def _ranked(self, page_hashes: Sequence[bytes], deadline: float) -> list[PeerLink]:
        """The peers worth a pull, the one that says it has most first; one alone need not be asked for that.

        All are asked at once, so that those that are slow or gone cost a part of the time, and cost it once.
        """
        links, header = self._links.awake(), self._parts.arena.header
        if len(links) < 2 or header is None:
            return links
        known = self._missing(page_hashes)
        seconds = _RANKING * (deadline - time.monotonic())
        answers = await asyncio.gather(
            *(link.known(header, page_hashes[known:], max(0.001, seconds)) for link in links),
            return_exceptions=True,
        )
        counted: list[tuple[int, PeerLink]] = []
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, HotsetError):
                self._failed(link, answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer:
                counted.append((answer, link))
            else:
                self.counters.empty += 1
        return [link for _, link in sorted(counted, key=lambda pair: pair[0], reverse=True)]

    async def _pull(self, link: PeerLink, page_hashes: Sequence[bytes], deadline: float) -> None:
        """Pull from one peer; a fault is logged and counted, and the peer left alone for a while."""
        arena, table = self._parts.arena, self._parts.space.table
        assert arena.header is not None, "a table has a layout"
        before = table.match(THE_PULLER, page_hashes)  # held, so that room is not made of them
        theirs = _NOTHING
        try:
            wanted = page_hashes[len(before) :]
            theirs = await link.match(arena.header, wanted, max(0.001, deadline - time.monotonic()))
            error: HotsetError | None = None
            if not len(theirs):
                self.counters.empty += 1
            elif self._parts.space.table is table:  # else it was laid out for another model meanwhile
                error = await self._bring(link, table, before, wanted, theirs, deadline)
        except HotsetError as raised:
            error = raised
        finally:
            # Sealed pages stay, cached; those still open are free again. The thread has ended with them.
            table.release_all(THE_PULLER)
        if error is not None:
            self._failed(link, error)
        else:
            self._go(self._release(link, theirs))  # nobody waits for that

    async def _release(self, link: PeerLink, theirs: PageRefs) -> None:
        try:
            await link.release(theirs, _RELEASE_SECONDS)
        except HotsetError as error:
            self._failed(link, error)

    def _failed(self, link: PeerLink, error: HotsetError) -> None:
        """Count it, tell it, and leave the peer alone for a while."""
        self.counters.failures += 1
        self._links.rest(link)
        self._thread.submit(self._fetcher.drop, link.address)
        _log.warning("pull_failed peer=%s error=%s", link.address, error)

    def _go(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _in_thread(self, work: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        """Have the thread do something, to which connections belong."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _bring(
        self,
        link: PeerLink,
        table: PageTable,
        before: PageRefs,
        page_hashes: Sequence[bytes],
        theirs: PageRefs,
        deadline: float,
    ) -> HotsetError | None:
        """Fetch what there is room for, batch by batch, and seal what arrives."""
        layout = self._parts.arena.layout
        assert layout is not None, "a table has a layout"
        face = link.face(self._transport)
        into = PageBytes(self._parts.arena.buffer, layout)
        last_start = time.monotonic() + _ASKING * (deadline - time.monotonic())
        parent: PageRef | None = list(before)[-1] if len(before) else None
        done, error = 0, None
        while done < len(theirs) and time.monotonic() < last_start:
            room = min(batch_pages(layout.page_bytes), table.counts.free + table.counts.cached)
            part = PageRefs(theirs.pages[done : done + room], theirs.generations[done : done + room])
            ours = table.update(THE_PULLER, _NOTHING, NO_SEALS, len(part))
            if ours is None or not len(ours):
                break
            fetched = await self._in_thread(
                self._fetcher.fetch, face, part, into, ours.pages, last_start, deadline
            )
            seals = []
            for page in list(ours)[: fetched.pages]:
                seals.append(Seal(page, page_hashes[done], parent))
                parent, done = page, done + 1
            table.update(THE_PULLER, _NOTHING, Seals.of(seals), 0)
            self.counters.pages += fetched.pages
            error = fetched.error
            if fetched.pages < len(ours):
                break
        _log.info("pulled peer=%s pages=%d of=%d", link.address, done, len(theirs))
        return error
