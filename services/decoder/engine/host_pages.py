"""What the scheduler asks of the store: pages, in one call a step, and those that are there already.

The Protocol, and a store in memory for tests and for planning without a server.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from services.contract.errors import HotsetError


class PagesLost(HotsetError):
    """The store has taken back all that this session held: whoever had pages cannot go on."""


class HostPage(NamedTuple):
    """A page of the arena and the life of it that is ours."""

    page: int
    generation: int


class SealOrder(NamedTuple):
    """A full page of ours that becomes immutable and findable."""

    page: HostPage
    page_hash: bytes
    parent: HostPage | None  # the page before it in the sequence
    tokens: Sequence[int] = ()  # of the page, if the prompt covers it


class HostPages(Protocol):
    """Pages of one session. Only the engine's loop calls it."""

    @property
    def total(self) -> int:
        """Pages of the arena."""

    @property
    def free(self) -> int:
        """Pages that an exchange can get, as far as known; other clients may be quicker."""

    @property
    def lent(self) -> int:
        """References that matches and exchanges have handed out, less those given back."""

    def match(self, page_hashes: Sequence[bytes], prompt: Sequence[int] = ()) -> list[HostPage]:
        """Take a reference to each page of the longest sealed prefix of a chain of hashes.

        Afterwards `free` is up to date, whether or not there were any hashes.

        Args:
            page_hashes: the chain.
            prompt: the tokens that it begins with.

        Raises:
            Unavailable: the store is out of reach; nothing was taken.
        """

    def exchange(
        self, give: list[HostPage], want: int, seals: Sequence[SealOrder] = ()
    ) -> list[HostPage] | None:
        """Give references back, seal, and take `want` pages; None if there are too few, and then none were.

        No page of `seals`, and no parent of one, is among those given back by the same call.

        Raises:
            Unavailable: the store is out of reach; nothing was given or taken.
            PagesLost: nothing that was taken before is there any more. Told once; nothing was given or taken.
        """


class LocalPages:
    """An arena's worth of pages without a store; sealed pages stay until room is short."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = list(range(total - 1, -1, -1))
        self._generation = [0] * total
        self._references: Counter[HostPage] = Counter()
        self._by_hash: dict[bytes, HostPage] = {}
        self._hash_of: dict[HostPage, bytes] = {}
        self._idle: OrderedDict[HostPage, None] = OrderedDict()  # sealed and held by nobody, stalest first
        self.calls = 0

    @property
    def total(self) -> int:
        """Pages there are."""
        return self._total

    @property
    def free(self) -> int:
        """Pages not held."""
        return len(self._free) + len(self._idle)

    @property
    def lent(self) -> int:
        """References."""
        return self._references.total()

    def references(self, page: HostPage) -> int:
        """Of one page."""
        return self._references[page]

    def found(self) -> dict[bytes, HostPage]:
        """What a match may find, by its hash."""
        return dict(self._by_hash)

    def match(self, page_hashes: Sequence[bytes], prompt: Sequence[int] = ()) -> list[HostPage]:
        """As the Protocol says."""
        found = []
        for page_hash in page_hashes:
            page = self._by_hash.get(page_hash)
            if page is None:
                break
            self._references[page] += 1
            self._idle.pop(page, None)
            found.append(page)
        return found

    def exchange(
        self, give: list[HostPage], want: int, seals: Sequence[SealOrder] = ()
    ) -> list[HostPage] | None:
        """As the Protocol says."""
        self.calls += 1
        for page in reversed(give):  # the last pages of a sequence go stale first
            if self._references[page] < 1:
                raise ValueError(f"page {page.page} is not held")
            self._references[page] -= 1
            if not self._references[page]:
                del self._references[page]
                if page in self._hash_of:
                    self._idle[page] = None
                else:
                    self._free.append(page.page)
        for page, page_hash, parent, _ in seals:
            if self._references[page] < 1 or page in self._hash_of:
                raise ValueError(f"page {page.page} is not held, or sealed already")
            if parent is not None and parent not in self._hash_of:
                raise ValueError(f"the parent of page {page.page} is not sealed")
            self._hash_of[page] = page_hash
            self._by_hash.setdefault(page_hash, page)
        if want > self.free:
            return None
        return [self._take() for _ in range(want)]

    def _take(self) -> HostPage:
        if not self._free:
            stale, _ = self._idle.popitem(last=False)
            page_hash = self._hash_of.pop(stale)
            if self._by_hash.get(page_hash) == stale:
                del self._by_hash[page_hash]
            self._free.append(stale.page)
        number = self._free.pop()
        self._generation[number] += 1
        page = HostPage(number, self._generation[number])
        self._references[page] = 1
        return page
