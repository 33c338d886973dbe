"""Cached pages in the order they go: the one unused for longest is evicted first.

Knows page numbers only. A ring of links in two arrays, so that a page enters, leaves and is evicted in
constant time, and no page has an object of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.contract.errors import HotsetError

Pages = npt.NDArray[np.int64]
"""Page numbers, `[n]`; numpy indexes with this type directly."""

_ABSENT = -1


class Recency:
    """A list of pages from stale to recent; each page is in it once or not at all."""

    def __init__(self, page_count: int) -> None:
        self._end = page_count  # a link of its own, before the stalest and after the most recent
        self._after = np.full(page_count + 1, _ABSENT, np.int32)
        self._before = np.full(page_count + 1, _ABSENT, np.int32)
        # Views for single links: an element of a memoryview costs half of what one of an array does.
        self._after_one: memoryview = self._after.data
        self._before_one: memoryview = self._before.data
        self._after_one[self._end] = self._before_one[self._end] = self._end
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, pages: Pages) -> None:
        """Add distinct `pages`, none of them in the list, as the most recent; the last of them the most."""
        if not len(pages):
            return
        first, last, recent = int(pages[0]), int(pages[-1]), self._before_one[self._end]
        self._after[pages[:-1]] = pages[1:]
        self._before[pages[1:]] = pages[:-1]
        self._after_one[recent], self._before_one[first] = first, recent
        self._after_one[last], self._before_one[self._end] = self._end, last
        self._count += len(pages)

    def remove(self, pages: Pages) -> None:
        """Take `pages` out; each is in the list."""
        after, before = self._after_one, self._before_one
        for page in pages.tolist():
            following, preceding = after[page], before[page]
            after[preceding], before[following] = following, preceding
        self._after[pages] = _ABSENT
        self._count -= len(pages)

    def stalest(self, count: int) -> Pages:
        """The `count` pages that go first; the list has as many."""
        page, found = self._end, np.empty(count, np.int64)
        for index in range(count):
            page = self._after_one[page]
            found[index] = page
        return found

    def check_integrity(self, cached: npt.NDArray[np.bool_]) -> None:
        """Compare the list with `cached`, which says of every page whether it must be in it.

        Raises:
            HotsetError: they differ, or the links contradict themselves.
        """
        inside = np.flatnonzero(self._after[:-1] != _ABSENT)
        for broken, what in (
            (not np.array_equal(inside, np.flatnonzero(cached)), "the pages listed are not those cached"),
            (len(inside) != self._count, "the pages listed are miscounted"),
            ((self._before[self._after[inside]] != inside).any(), "a link does not lead back"),
        ):
            if broken:
                raise HotsetError(f"eviction order: {what}")
        if not np.array_equal(np.sort(self.stalest(self._count)), inside):
            raise HotsetError("eviction order: the links miss a page")
