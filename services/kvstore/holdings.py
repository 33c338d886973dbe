"""Who holds which page how often.

Knows holders (numbers) and pages; neither what a page is nor what becomes of one that nobody holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from services.contract.errors import HotsetError
from services.kvstore.recency import Pages

Counts = npt.NDArray[np.uint32]
"""References, `[n]`."""


class Holdings:
    """References of every holder to every page, and their sums: 4 bytes a page and holder, once touched."""

    def __init__(self, page_count: int) -> None:
        self._none: Counts = np.zeros(page_count, np.uint32)
        self._none.flags.writeable = False
        self._counts: dict[int, Counts] = {}
        self._totals: dict[int, int] = {}
        self.references: Counts = np.zeros(page_count, np.uint32)  # of all holders
        self.page_count = page_count

    def holders(self) -> Iterator[int]:
        """Everyone who holds a page."""
        return (holder for holder, total in self._totals.items() if total)

    def total(self, holder: int) -> int:
        """References of `holder`, over all pages."""
        return self._totals.get(holder, 0)

    def of(self, holder: int) -> Counts:
        """References of `holder` to every page, `[pages]`; to be read only, and at once."""
        return self._counts.get(holder, self._none)

    def add(self, holder: int, pages: Pages, counts: Counts | int = 1) -> None:
        """Add `counts` references of `holder` to distinct `pages`."""
        owned = self._counts.get(holder)
        if owned is None:
            owned = self._counts[holder] = np.zeros(self.page_count, np.uint32)
        self._totals[holder] = self.total(holder) + _sum(pages, counts)
        owned[pages] += np.uint32(counts) if isinstance(counts, int) else counts
        self.references[pages] += np.uint32(counts) if isinstance(counts, int) else counts

    def take(self, holder: int, pages: Pages, counts: Counts) -> Pages:
        """Take `counts` references, which `holder` has, to distinct `pages`; those nobody holds any more."""
        self._totals[holder] -= _sum(pages, counts)
        self._counts[holder][pages] -= counts
        self.references[pages] -= counts
        lost: Pages = pages[self.references[pages] == 0]
        return lost

    def forget(self, holder: int) -> None:
        """Free what is kept for `holder`, who holds nothing."""
        self._counts.pop(holder, None)
        self._totals.pop(holder, None)

    def check_integrity(self) -> None:
        """Compare everything with everything.

        Raises:
            HotsetError: the counts contradict themselves.
        """
        sums = sum((counts.astype(np.int64) for counts in self._counts.values()), np.int64(0))
        for broken, what in (
            ((self.references != sums).any(), "reference counts are not the sums of what holders hold"),
            (
                {holder: int(counts.sum()) for holder, counts in self._counts.items()} != self._totals,
                "a holder's references are miscounted",
            ),
        ):
            if broken:
                raise HotsetError(f"page table: {what}")


def _sum(pages: Pages, counts: Counts | int) -> int:
    return len(pages) * counts if isinstance(counts, int) else int(counts.sum())
