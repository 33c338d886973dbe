"""What a store's pages must be, told with sets and lists: slow, and obviously right.

Knows holders, hashes, depths and the order of eviction; nothing of arrays or files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.kvstore.page_refs import PageRef

RESTARTED = "what a restarted store keeps for claims"


@dataclass(frozen=True)
class Sealed:
    """A page that is never written again."""

    page_hash: bytes
    parent: PageRef | None


@dataclass
class PageModel:
    """Every page that is not free."""

    total: int
    open: dict[PageRef, str] = field(default_factory=dict)  # and whose
    sealed: dict[PageRef, Sealed] = field(default_factory=dict)
    held: dict[str, Counter[PageRef]] = field(default_factory=dict)
    found: dict[bytes, PageRef] = field(default_factory=dict)
    stale: list[PageRef] = field(default_factory=list)  # cached, the next to go first
    depths: dict[PageRef, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.total - len(self.open) - len(self.sealed)

    def holds(self, holder: str) -> Counter[PageRef]:
        return self.held.setdefault(holder, Counter())

    def referenced(self, ref: PageRef) -> bool:
        return any(owned[ref] for owned in self.held.values())

    def allocate(self, holder: str, wanted: int) -> bool:
        """Whether there is room; evicts for it."""
        if wanted > self.free + len(self.stale):
            return False
        while self.free < wanted:
            gone = self.stale.pop(0)
            del self.found[self.sealed.pop(gone).page_hash]
        return True

    def take(self, holder: str, refs: Iterable[PageRef]) -> None:
        for ref in refs:
            self.open[ref] = holder
            self.holds(holder)[ref] += 1

    def seal(self, ref: PageRef, page_hash: bytes, parent: PageRef | None) -> None:
        del self.open[ref]
        self.sealed[ref] = Sealed(page_hash, parent)
        self.depths[ref] = 0 if parent is None else self.depths[parent] + 1
        self.found.setdefault(page_hash, ref)

    def match(self, holder: str, chain: Iterable[bytes]) -> list[PageRef]:
        pages = []
        for page_hash in chain:
            if page_hash not in self.found:
                break
            ref = self.found[page_hash]
            pages.append(ref)
            self.holds(holder)[ref] += 1
            if ref in self.stale:
                self.stale.remove(ref)
        return pages

    def drop(self, holder: str, refs: Counter[PageRef]) -> None:
        self.holds(holder).subtract(refs)
        self.held[holder] = +self.held[holder]
        used = set[PageRef]()
        for ref in sorted(refs):
            if self.referenced(ref):
                continue
            if ref in self.open:
                del self.open[ref]
                continue
            first = self.found.setdefault(self.sealed[ref].page_hash, ref)
            if first != ref:
                del self.sealed[ref]
            if not self.referenced(first):
                used.add(first)
        self.stale = [ref for ref in self.stale if ref not in used]
        self.stale += sorted(used, key=lambda ref: (-self.depths[ref], ref.page))

    def drop_all(self, holder: str) -> None:
        self.drop(holder, self.holds(holder))
        del self.held[holder]

    def drop_all_if_known(self, holder: str) -> None:
        if holder in self.held:
            self.drop_all(holder)

    def restart(self) -> None:
        """As from the file: the order of use and who held what sealed page are not in it."""
        self.held = {}
        for ref, holder in self.open.items():
            self.holds(holder)[ref] += 1
        self.held[RESTARTED] = Counter(self.sealed.keys())
        self.stale = []
        self.found = {}
        for ref in sorted(self.sealed):
            self.found.setdefault(self.sealed[ref].page_hash, ref)
        self.depths = {ref: self._depth(ref) for ref in self.sealed}

    def _depth(self, ref: PageRef) -> int:
        parent = self.sealed[ref].parent
        return 0 if parent not in self.sealed or parent is None else self._depth(parent) + 1
