"""Which pages become sealed, under which hashes, behind which parents: columns, as page_refs.py's.

Knows shapes; whether a page can be sealed, seal_check.py says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from services.contract.page_header import NO_PAGE
from services.kvstore.page_refs import PageRef, PageRefs


class Seal(NamedTuple):
    """Makes a full page immutable and findable."""

    page: PageRef
    page_hash: bytes  # 16 to 32 bytes
    parent: PageRef | None  # the page before it in the sequence
    tokens: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class Seals:
    """Of one call, in order: a parent may be sealed by the same call, before its child."""

    pages: PageRefs  # [n]
    page_hashes: Sequence[bytes]  # [n], 16 to 32 bytes each
    parents: PageRefs  # [n]; page NO_PAGE for the first of a sequence
    tokens: Sequence[bytes] = ()  # [n] or none at all: ids, 4 bytes each, little-endian; for who is told

    @classmethod
    def of(cls, seals: Iterable[Seal]) -> Self:
        """From single seals."""
        listed = list(seals)
        nothing = PageRef(NO_PAGE, 0)
        return cls(
            PageRefs.of(seal.page for seal in listed),
            [seal.page_hash for seal in listed],
            PageRefs.of(seal.parent or nothing for seal in listed),
            [seal.tokens for seal in listed],
        )

    def __len__(self) -> int:
        return len(self.page_hashes)


NO_SEALS = Seals.of(())
