"""The page headers of an arena as columns, many pages at a time.

Knows what the fields mean to one another and in which order they are written; who may change which page is
pages.py's affair. Every write goes to the file; `state` is written last.
"""

from __future__ import annotations

import numpy as np

from services.contract.errors import InvalidRequest, SetupError, StaleReference
from services.contract.page_header import PageState
from services.kvstore.arena import PageHeaders
from services.kvstore.holdings import Counts
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.recency import Pages
from services.kvstore.seals import Seals

FREE, OPEN, SEALED = int(PageState.FREE), int(PageState.OPEN), int(PageState.SEALED)
_HASH_BYTES = 32  # of a header


class HeaderColumns:
    """Views of the headers' fields, each `[pages]`."""

    def __init__(self, headers: PageHeaders, nobody: int) -> None:
        """Take up `headers`; no open page may belong to `nobody`.

        Raises:
            SetupError: a header is damaged.
        """
        self.state = headers["state"]
        self.generation = headers["generation"]
        self.owner = headers["owner"]
        self._hash = headers["hash"]
        self._hash_bytes = headers["hash_bytes"]
        self._parent = headers["parent"]
        self._parent_generation = headers["parent_generation"]
        self.page_count = len(headers)
        without_hash = (self._hash_bytes == 0) | (self._hash_bytes > _HASH_BYTES)
        damaged = (
            (self.state > SEALED)
            | ((self.state == OPEN) & (self.owner == nobody))
            | ((self.state == SEALED) & without_hash)
        )
        if damaged.any():
            raise SetupError(
                f"the arena's header of page {int(damaged.argmax())} is damaged; "
                "delete the file to start empty"
            )

    def check_live(self, refs: PageRefs) -> None:
        """Refuse references to pages that are not there or of another life.

        Raises:
            InvalidRequest, StaleReference: of the first one that is wrong.
        """
        if not len(refs):
            return
        if refs.pages.max() < self.page_count and (self.generation[refs.pages] == refs.generations).all():
            return
        for ref in refs:
            self.check_live_one(ref)

    def check_live_one(self, ref: PageRef) -> None:
        """As `check_live`, of one."""
        if ref.page >= self.page_count:
            raise InvalidRequest(f"page {ref.page} does not exist; the arena has {self.page_count}")
        generation = int(self.generation[ref.page])
        if ref.generation != generation:
            raise StaleReference(
                f"page {ref.page} is at generation {generation}, the reference is of {ref.generation}"
            )

    def hashes(self, pages: Pages) -> list[bytes]:
        """The hashes that sealed `pages` were given."""
        packed, size = self._hash[pages].tobytes(), _HASH_BYTES
        lengths = self._hash_bytes[pages].tolist()
        return [packed[at * size : at * size + length] for at, length in enumerate(lengths)]

    def depths(self, sealed: Pages) -> Counts:
        """How many pages stand before each of `sealed` in its sequence, `[pages]`; 0 for all others."""
        before = np.arange(self.page_count)
        parents = self._parent[sealed].astype(np.int64)
        known = parents < self.page_count
        sealed, parents = sealed[known], parents[known]
        known = (self.state[parents] == SEALED) & (
            self.generation[parents] == self._parent_generation[sealed]
        )
        before[sealed[known]] = parents[known]
        depth: Counts = (before != np.arange(self.page_count)).astype(np.uint32)
        # Each round doubles how far a page looks back; a sequence of all pages takes 24 rounds at most.
        for _ in range(self.page_count.bit_length()):
            depth = depth + depth[before]
            before = before[before]
        return depth

    def free(self, pages: Pages) -> None:
        """The pages are nobody's from now on, and no hash finds them after a restart."""
        self.state[pages] = FREE

    def open(self, pages: Pages, owner: int) -> Counts:
        """Free `pages` begin a life as the owner's; their generations."""
        generations: Counts = self.generation[pages] + np.uint32(1)  # wraps, and still differs
        self.generation[pages] = generations
        self.owner[pages] = owner
        self.state[pages] = OPEN
        return generations

    def seal(self, seals: Seals) -> None:
        """Open pages become sealed."""
        pages = seals.pages.pages
        hashes = b"".join(page_hash.ljust(_HASH_BYTES, b"\0") for page_hash in seals.page_hashes)
        self._hash[pages] = np.frombuffer(hashes, np.uint8).reshape(-1, _HASH_BYTES)
        self._hash_bytes[pages] = list(map(len, seals.page_hashes))
        self._parent[pages] = seals.parents.pages
        self._parent_generation[pages] = seals.parents.generations
        self.state[pages] = SEALED
