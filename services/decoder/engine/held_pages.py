"""What a session with the store holds: references to pages, and which of them are sealed.

Knows pages; neither the wire nor whose they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from services.decoder.engine.host_pages import HostPage, SealOrder


class HeldPages:
    """A page may be held more than once: every sequence that reads it has a reference."""

    def __init__(self) -> None:
        self._held: Counter[HostPage] = Counter()
        self._sealed: set[HostPage] = set()
        self._lives: dict[int, int] = {}  # a page's latest generation here
        self._late: Counter[HostPage] = Counter()  # gone, and whoever gave them will give them again

    @property
    def count(self) -> int:
        """References."""
        return self._held.total()

    def references(self) -> Iterable[HostPage]:
        """Each page as often as it is held."""
        return self._held.elements()

    def take(self, pages: Iterable[HostPage]) -> None:
        """One more reference to each."""
        taken = list(pages)
        self._held.update(taken)
        self._lives.update(taken)

    def lives(self, pages: Iterable[int]) -> list[int]:
        """The generation in which each page was taken last; 0, which no page is taken in, of others."""
        return [self._lives.get(page, 0) for page in pages]

    def let_go(self, pages: Iterable[HostPage], *, late: bool) -> None:
        """One less of each; `late`, whoever gave them was told that nothing had happened."""
        gone = list(pages)
        for page in gone:  # those alone: there are a hundred times as many
            if self._held[page] > 1:
                self._held[page] -= 1
            else:
                self._held.pop(page, None)
                self._sealed.discard(page)
        if late:
            self._late.update(gone)

    def still_here(self, pages: Iterable[HostPage]) -> list[HostPage]:
        """Of references that are given, perhaps not for the first time, those that have not gone."""
        if not self._late:
            return [page for page in pages if page in self._held]
        return list(((Counter(pages) - self._late) & self._held).elements())

    def told(self, pages: Iterable[HostPage]) -> None:
        """Whoever gave them knows by now that they have gone."""
        if self._late:
            self._late -= Counter(pages)

    def after_loss(self, unlent: Iterable[HostPage]) -> HeldPages:
        """What begins where nothing is there any more; all but `unlent` will be given back all the same, and
        a page may be taken again before that.
        """
        fresh = HeldPages()
        fresh._late = self._late + (self._held - Counter(unlent))
        return fresh

    def note_sealed(self, pages: Iterable[HostPage]) -> None:
        """They are sealed now."""
        self._sealed.update(pages)

    def only_sealed(self, pages: Iterable[HostPage]) -> None:
        """These are sealed, and no others."""
        self._sealed = set(pages)

    def possible(self, seals: Sequence[SealOrder]) -> list[SealOrder]:
        """Those of pages that are held, not sealed yet, and whose parent is; a restart may have cost it."""
        fresh: set[HostPage] = set()
        possible = []
        for seal in seals:
            page, parent = seal.page, seal.parent
            follows = parent is None or parent in self._sealed or parent in fresh
            if follows and page in self._held and not (page in self._sealed or page in fresh):
                fresh.add(page)
                possible.append(seal)
        return possible
