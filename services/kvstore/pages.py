"""The life of every host page: free, open, sealed; who holds it; the headers that say so after a kill.

Knows pages, holders (numbers) and hashes; neither sessions nor leases nor the wire nor a page's bytes.

    FREE   --allocate--> OPEN     generation + 1, owner = the holder, one reference
    OPEN   --seal------> SEALED   hash and parent; never written again
    OPEN   --drop------> FREE
    SEALED --last drop-> FREE     once a prefix index finds pages by hash: cached, evicted when room is short

Invariants, checked by `check_integrity`: a page is free or held, never both; an open page has one reference,
its owner's; reference counts are the sums of what the holders hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from services.contract.errors import HotsetError, InvalidRequest, SetupError, StaleReference, StateConflict
from services.contract.page_header import NO_PAGE, PageState
from services.kvstore.arena import PageHeaders
from services.kvstore.orders import PageCounts, PageRef, Seal, check_page_hash

THE_STORE = 0
"""Holds a reopened arena's sealed pages until their clients have claimed them; no session has this number."""

_FREE, _OPEN, _SEALED = int(PageState.FREE), int(PageState.OPEN), int(PageState.SEALED)
_GENERATIONS = 2**32


class PageTable:
    """Every page of one laid-out arena. Each method validates all it is given before it changes anything."""

    def __init__(self, headers: PageHeaders) -> None:
        """Take up what `headers` say: an open page is its owner's, a sealed one THE_STORE's.

        Raises:
            SetupError: a header is damaged.
        """
        self._state = headers["state"]
        self._generation = headers["generation"]
        self._hash = headers["hash"]
        self._hash_bytes = headers["hash_bytes"]
        self._parent = headers["parent"]
        self._parent_generation = headers["parent_generation"]
        self._owner = headers["owner"]
        self.page_count = len(headers)
        self.freed = 0  # pages that became free since the table was made
        damaged = (self._state > _SEALED) | ((self._state == _OPEN) & (self._owner == THE_STORE))
        if damaged.any():
            raise SetupError(
                f"the arena's header of page {int(damaged.argmax())} is damaged; "
                "delete the file to start empty"
            )
        # The page freed last is used first: it lies in memory already, so the arena stays small.
        self._free: list[int] = np.flatnonzero(self._state == _FREE)[::-1].tolist()
        self._holdings: dict[int, dict[int, int]] = {}  # holder -> page -> references
        self._references: dict[int, int] = {}  # held page -> references of all holders
        self._open_count = 0
        for page in np.flatnonzero(self._state == _OPEN).tolist():
            self._open_count += 1
            self._hold(int(self._owner[page]), page)
        for page in np.flatnonzero(self._state == _SEALED).tolist():
            self._hold(THE_STORE, page)

    @property
    def counts(self) -> PageCounts:
        """How many pages are in which state, now."""
        held = len(self._references)
        return PageCounts(
            total=self.page_count,
            free=len(self._free),
            open=self._open_count,
            sealed=held - self._open_count,
            cached=self.page_count - len(self._free) - held,
        )

    def holders(self) -> list[int]:
        """Everyone who holds a page."""
        return list(self._holdings)

    def held_by(self, holder: int) -> int:
        """References that `holder` holds."""
        return sum(self._holdings.get(holder, {}).values())

    def update(
        self, holder: int, releases: Sequence[PageRef], seals: Sequence[Seal], wanted: int
    ) -> list[PageRef] | None:
        """Release, then seal, then allocate for `holder`.

        Returns:
            `wanted` new open pages, or None where so many are not free; the rest is done even then.

        Raises:
            InvalidRequest, StaleReference, StateConflict: a release or a seal is impossible; nothing is done.
        """
        released = self._check_releases(holder, releases)
        self._check_seals(holder, seals, released)
        for page, references in released.items():
            self._drop(holder, page, references)
        for seal in seals:
            self._seal(seal)
        if wanted > len(self._free):
            return None
        return [self._allocate(holder) for _ in range(wanted)]

    def adopt(self, holder: int, held: Iterable[PageRef]) -> list[PageRef]:
        """Make `held`, one item a reference, all that `holder` holds: a client takes its session up again.

        It may name what the table says is the holder's, and sealed pages that THE_STORE keeps for claims.

        Returns:
            Those of the pages that are sealed, each once.

        Raises:
            InvalidRequest, StaleReference, StateConflict: a page is not the holder's; nothing is done.
        """
        claimed = Counter(held)
        owned = self._holdings.get(holder, {})
        for ref, references in claimed.items():
            self._check_live(ref)
            for_claims = ref.page in self._holdings.get(THE_STORE, {})
            if references > owned.get(ref.page, 0) and not for_claims:
                raise StateConflict(
                    f"page {ref.page} is claimed {references} times and the session holds it "
                    f"{owned.get(ref.page, 0)} times; attach with a new token and compute it again"
                )
        pages = {ref.page: references for ref, references in claimed.items()}
        for page, references in pages.items():
            self._hold(holder, page, references - owned.get(page, 0))
        for page, references in list(self._holdings.get(holder, {}).items()):
            self._drop(holder, page, references - pages.get(page, 0))
        return [ref for ref in claimed if self._state[ref.page] == _SEALED]

    def release_all(self, holder: int) -> int:
        """Give back everything that `holder` holds; the references given back."""
        owned = list(self._holdings.get(holder, {}).items())
        for page, references in owned:
            self._drop(holder, page, references)
        return sum(references for _, references in owned)

    def check_integrity(self) -> None:
        """Compare everything with everything.

        Raises:
            HotsetError: the table or the headers contradict themselves.
        """
        sums: Counter[int] = Counter()
        for owned in self._holdings.values():
            sums.update(owned)
        states = self._state.tolist()
        open_pages = {page for page, state in enumerate(states) if state == _OPEN}
        free_pages = {page for page, state in enumerate(states) if state == _FREE}
        owners = {page: [h for h, owned in self._holdings.items() if page in owned] for page in open_pages}
        for broken, what in (
            (dict(sums) != self._references, "reference counts are not the sums of what holders hold"),
            (min(self._references.values(), default=1) < 1, "a held page has no reference"),
            (not all(self._holdings.values()), "a holder without a page is listed"),
            (len(self._free) != len(set(self._free)), "a page is free twice"),
            (set(self._free) != free_pages, "the free list is not the pages whose header says free"),
            (free_pages & self._references.keys(), "a free page is held"),
            (len(open_pages) != self._open_count, "open pages are miscounted"),
            (any(self._references.get(page) != 1 for page in open_pages), "an open page is shared or unheld"),
            (
                any(who != [self._owner[page]] for page, who in owners.items()),
                "an open page's owner is wrong",
            ),
        ):
            if broken:
                raise HotsetError(f"page table: {what}")

    def _check_live(self, ref: PageRef) -> None:
        if ref.page >= self.page_count:
            raise InvalidRequest(f"page {ref.page} does not exist; the arena has {self.page_count}")
        generation = int(self._generation[ref.page])
        if ref.generation != generation:
            raise StaleReference(
                f"page {ref.page} is at generation {generation}, the reference is of {ref.generation}"
            )

    def _check_held(self, holder: int, ref: PageRef, released: Counter[int]) -> None:
        """That `holder` has a reference to `ref` beyond those in `released`."""
        self._check_live(ref)
        held = self._holdings.get(holder, {}).get(ref.page, 0)
        if held <= released[ref.page]:
            raise StateConflict(
                f"page {ref.page} is not held by this session"
                + (f" more than {held} times, and this call gives that back already" if held else "")
            )

    def _check_releases(self, holder: int, releases: Sequence[PageRef]) -> Counter[int]:
        released: Counter[int] = Counter()
        for ref in releases:
            self._check_held(holder, ref, released)
            released[ref.page] += 1
        return released

    def _check_seals(self, holder: int, seals: Sequence[Seal], released: Counter[int]) -> None:
        sealing: set[int] = set()
        for seal in seals:
            self._check_held(holder, seal.page, released)
            if self._state[seal.page.page] != _OPEN or seal.page.page in sealing:
                raise StateConflict(f"page {seal.page.page} is sealed already")
            check_page_hash(seal.page_hash)
            if seal.parent is not None:
                self._check_held(holder, seal.parent, released)
                if self._state[seal.parent.page] != _SEALED and seal.parent.page not in sealing:
                    raise StateConflict(
                        f"page {seal.page.page} has the parent {seal.parent.page}, which is not sealed; "
                        "seal a sequence's pages in order"
                    )
            sealing.add(seal.page.page)

    def _allocate(self, holder: int) -> PageRef:
        page = self._free.pop()
        generation = (int(self._generation[page]) + 1) % _GENERATIONS
        self._generation[page] = generation
        self._owner[page] = holder
        self._state[page] = _OPEN
        self._open_count += 1
        self._hold(holder, page)
        return PageRef(page, generation)

    def _seal(self, seal: Seal) -> None:
        page = seal.page.page
        self._hash[page] = np.frombuffer(seal.page_hash.ljust(32, b"\0"), np.uint8)
        self._hash_bytes[page] = len(seal.page_hash)
        self._parent[page] = NO_PAGE if seal.parent is None else seal.parent.page
        self._parent_generation[page] = 0 if seal.parent is None else seal.parent.generation
        self._state[page] = _SEALED
        self._open_count -= 1

    def _hold(self, holder: int, page: int, references: int = 1) -> None:
        if references > 0:
            owned = self._holdings.setdefault(holder, {})
            owned[page] = owned.get(page, 0) + references
            self._references[page] = self._references.get(page, 0) + references

    def _drop(self, holder: int, page: int, references: int) -> None:
        if references <= 0:
            return
        owned = self._holdings[holder]
        owned[page] -= references
        if not owned[page]:
            del owned[page]
            if not owned:
                del self._holdings[holder]
        self._references[page] -= references
        if not self._references[page]:
            del self._references[page]
            self._free_page(page)

    def _free_page(self, page: int) -> None:
        """Page `page` has lost its last reference. A prefix index would keep a sealed one, as cached."""
        if self._state[page] == _OPEN:
            self._open_count -= 1
        self._state[page] = _FREE
        self._free.append(page)
        self.freed += 1
