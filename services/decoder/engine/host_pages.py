"""What the scheduler asks of the store: pages, in one call a step.

The Protocol, and a store in memory for tests and for planning without a server.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class HostPage(NamedTuple):
    """A page of the arena and the life of it that is ours."""

    page: int
    generation: int


class HostPages(Protocol):
    """Pages of one session. Only the engine's loop calls it."""

    @property
    def total(self) -> int:
        """Pages of the arena."""

    @property
    def free(self) -> int:
        """Pages that an exchange can get, as far as known; other clients may be quicker."""

    def exchange(self, give: list[HostPage], want: int) -> list[HostPage] | None:
        """Give pages back and take `want` others; None if there are too few, and then none were taken.

        Raises:
            Unavailable: the store is out of reach; nothing was given or taken.
        """


class LocalPages:
    """An arena's worth of pages without a store."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = list(range(total - 1, -1, -1))
        self._generation = [0] * total
        self.calls = 0

    @property
    def total(self) -> int:
        """Pages there are."""
        return self._total

    @property
    def free(self) -> int:
        """Pages not given out."""
        return len(self._free)

    def exchange(self, give: list[HostPage], want: int) -> list[HostPage] | None:
        """As the Protocol says."""
        self.calls += 1
        for page, generation in give:
            if self._generation[page] != generation or page in self._free:
                raise ValueError(f"page {page} is not held")
            self._free.append(page)
        if want > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(want)]
        for page in pages:
            self._generation[page] += 1
        return [HostPage(page, self._generation[page]) for page in pages]
