"""Which pages of the device-resident pools are free: the selector's index, and in full mode KV too.

Knows numbers only. A page may be shared by rows with a common prefix, so pages are counted references.
"""

from __future__ import annotations


class DevicePages:
    """Pages 0 to `count` - 1. Every page is free, or has at least one reference."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Of one page; 0 = it is free."""
        return self._references[page]

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None if there are fewer."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """One more reference to each page, which must be in use."""
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"device page {page} is free and cannot be shared")
            self._references[page] += 1

    def give_back(self, pages: list[int]) -> list[int]:
        """One reference less; a page without any is free. Those that are now."""
        first = len(self._free)
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"device page {page} is free already")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
        return self._free[first:]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free once or referenced."""
        unused = {page for page, count in enumerate(self._references) if count == 0}
        assert len(self._free) == len(set(self._free)), "a device page is free twice"
        assert set(self._free) == unused, "device pages are neither free nor referenced"
