"""What becomes findable and what is gone, told as vLLM's KV cache events (docs/decisions/0035).

Knows hashes, and the tokens that clients name as they seal; neither sockets nor the books of pages. A page
is told once its hash finds it and its tokens were named: by who seals it or, where another store or an
earlier life of this one computed it, by the first who finds it. What of an answer was decoded sparsely nobody
names: it is not what a router could look for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from services.contract.page_header import NO_PAGE
from services.kvstore.arena import PageHeaders
from services.kvstore.seals import NO_SEALS, Seals

Event: TypeAlias = Mapping[str, object]
"""One event, as vLLM 0.24 and later write it: a map with the event's name under `type`."""

MEDIUM = "CPU"  # vLLM's word for pages in host memory
_NAME_BYTES = 8  # of a hash, which stand for it in events


class PageNews(Protocol):
    """Whoever owns hashes tells it; everything comes from the store's event loop, and nothing may wait."""

    def naming(self, seals: Seals, headers: Callable[[], PageHeaders]) -> AbstractContextManager[None]:
        """While these are being booked, `found` may mean one of them; `headers` are those of the arena."""

    def found(self, page_hash: bytes) -> None:
        """A hash finds a page from now on."""

    def matched(self, page_hashes: Sequence[bytes], tokens: bytes, page_tokens: int) -> None:
        """These, the first of a chain, are found; `tokens`, 4 bytes each, as far as they were named."""

    def lost(self, page_hash: bytes) -> None:
        """A hash finds nothing any more."""

    def cleared(self) -> None:
        """No hash finds anything."""


class NoNews:
    """Tells nobody."""

    def naming(self, seals: Seals, headers: Callable[[], PageHeaders]) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def found(self, page_hash: bytes) -> None:
        """Nothing."""

    def matched(self, page_hashes: Sequence[bytes], tokens: bytes, page_tokens: int) -> None:
        """Nothing."""

    def lost(self, page_hash: bytes) -> None:
        """Nothing."""

    def cleared(self) -> None:
        """Nothing."""


NO_NEWS = NoNews()


@dataclass(slots=True)
class NewsFigures:
    """Since the process started; each only grows."""

    stored: int = 0  # pages
    removed: int = 0  # pages
    cleared: int = 0  # times


class KvEvents:
    """Makes events and hands them on, in order."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        """`send` must return at once."""
        self.figures = NewsFigures()
        self._send = send
        self._seals = NO_SEALS
        self._named: Mapping[bytes, int] = {}  # hash -> which of the seals
        self._headers: Callable[[], PageHeaders] | None = None
        self._told: set[int] = set()

    @contextmanager
    def naming(self, seals: Seals, headers: Callable[[], PageHeaders]) -> Iterator[None]:
        """As PageNews says."""
        self._seals, self._headers = seals, headers
        self._named = {page_hash: at for at, page_hash in enumerate(seals.page_hashes) if seals.tokens}
        try:
            yield
        finally:
            self._seals, self._headers, self._named = NO_SEALS, None, {}

    def found(self, page_hash: bytes) -> None:
        """As PageNews says."""
        at = self._named.get(page_hash)
        if at is not None and self._seals.tokens[at]:
            self._stored(name_of(page_hash), self._parent(at), self._seals.tokens[at])

    def matched(self, page_hashes: Sequence[bytes], tokens: bytes, page_tokens: int) -> None:
        """As PageNews says."""
        size, parent = 4 * page_tokens, None
        for at, page_hash in enumerate(page_hashes[: len(tokens) // size]):
            name = name_of(page_hash)
            if name not in self._told:
                self._stored(name, parent, tokens[at * size : (at + 1) * size])
            parent = name

    def _stored(self, name: int, parent: int | None, packed: bytes) -> None:
        tokens = np.frombuffer(packed, "<u4").tolist()
        self._told.add(name)
        self.figures.stored += 1
        self._send(
            {
                "type": "BlockStored",
                "block_hashes": [name],
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": len(tokens),
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
            }
        )

    def lost(self, page_hash: bytes) -> None:
        """As PageNews says."""
        name = name_of(page_hash)
        if name in self._told:
            self._told.remove(name)
            self.figures.removed += 1
            self._send({"type": "BlockRemoved", "block_hashes": [name], "medium": MEDIUM})

    def cleared(self) -> None:
        """As PageNews says."""
        self._told.clear()
        self.figures.cleared += 1
        self._send({"type": "AllBlocksCleared"})

    def _parent(self, at: int) -> int | None:
        page = int(self._seals.parents.pages[at])
        if page == NO_PAGE:
            return None
        assert self._headers is not None, "a page is found while none is named"
        header = self._headers()[page]
        return name_of(header["hash"].tobytes()[: int(header["hash_bytes"])])


def name_of(page_hash: bytes) -> int:
    """What stands for a hash in events: 64 bits of it, as an unsigned number."""
    return int.from_bytes(page_hash[:_NAME_BYTES], "big")
