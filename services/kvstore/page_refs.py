"""References to pages, many at a time: two arrays instead of thousands of objects.

Knows numbers; whether a page lives and whose it is, the table says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from services.kvstore.recency import Pages


class PageRef(NamedTuple):
    """A host page in the life of it that is meant."""

    page: int
    generation: int


@dataclass(frozen=True, slots=True, eq=False)
class PageRefs:
    """References in order; the same one may stand there more than once."""

    pages: Pages  # [n]
    generations: npt.NDArray[np.uint32]  # [n]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> Self:
        """From page, generation, page, generation ...; each below 2^32."""
        pairs = np.array(numbers, np.int64).reshape(-1, 2)
        return cls(pairs[:, 0], pairs[:, 1].astype(np.uint32))

    @classmethod
    def of(cls, refs: Iterable[PageRef]) -> Self:
        """From single references."""
        return cls.of_numbers([number for ref in refs for number in ref])

    def __len__(self) -> int:
        return len(self.pages)

    def __iter__(self) -> Iterator[PageRef]:
        return map(PageRef, self.pages.tolist(), self.generations.tolist())

    def counted(self) -> tuple[Pages, npt.NDArray[np.uint32]]:
        """Each page once, and how often it stands there."""
        pages, counts = np.unique(self.pages, return_counts=True)
        return pages, counts.astype(np.uint32)
