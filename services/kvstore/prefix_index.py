"""Which page is found by which hash, and the news of it.

Knows hashes and page numbers; what a hash covers (tokens, model, salt) is the clients' affair.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.page_news import NO_NEWS, PageNews

_SHARDS = 256
"""A table of millions moves to a larger one in 100 ms and more, while everybody waits; one of some thousands
does not show. The hashes' first byte spreads pages evenly."""


class PrefixIndex:
    """Hashes of 16 to 32 bytes to pages; hashes of different lengths differ."""

    def __init__(self, news: PageNews = NO_NEWS) -> None:
        """Empty, which `news` is told."""
        self._shards: tuple[dict[bytes, int], ...] = tuple({} for _ in range(_SHARDS))
        self._news = news
        news.cleared()

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def get(self, page_hash: bytes) -> int | None:
        """The page with this hash."""
        return self._shards[page_hash[0]].get(page_hash)

    def longest(self, page_hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of a chain."""
        shards, found = self._shards, list[int]()
        for page_hash in page_hashes:
            page = shards[page_hash[0]].get(page_hash)
            if page is None:
                break
            found.append(page)
        return found

    def add(self, page_hash: bytes, page: int) -> bool:
        """Let `page` be found, unless another page is found by this hash already; whether it is found."""
        if self._shards[page_hash[0]].setdefault(page_hash, page) != page:
            return False
        self._news.found(page_hash)
        return True

    def remove(self, page_hash: bytes) -> None:
        """Forget a hash, which is known."""
        del self._shards[page_hash[0]][page_hash]
        self._news.lost(page_hash)
