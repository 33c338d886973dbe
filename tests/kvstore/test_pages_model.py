"""Long random lives of a page table against page_model.py: requests that share beginnings, deaths, restarts.

test_store_model.py covers sessions and time; here the table is always nearly full, so that most steps evict.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contract.page_header import PAGE_HEADER
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.pages import THE_STORE, PageTable
from services.kvstore.seals import NO_SEALS, Seal, Seals
from tests.kvstore.page_model import RESTARTED, PageModel

PAGES = 16
HOLDERS = {"ann": 11, "bob": 2**64 - 1, "cid": 5}
STEPS = 150


def hashes_of(letters: str) -> list[bytes]:
    return [letters[: end + 1].encode().ljust(16, b".") for end in range(len(letters))]


class Life:
    """The table, the model, and one draw after another."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.headers = np.zeros(PAGES, PAGE_HEADER)
        self.table = PageTable(self.headers)
        self.model = PageModel(PAGES)

    def request(self, holder: str) -> None:
        """Match, allocate the rest, seal all or all but the last; perhaps go on holding them."""
        hashes = hashes_of("".join(self.random.choices("ab", k=self.random.randint(1, 6))))
        if self.random.random() < 0.3:
            pages = []  # at the same time as another: both compute it
        else:
            pages = list(self.table.match(HOLDERS[holder], hashes))
            assert pages == self.model.match(holder, hashes)
        rest = hashes[len(pages) :]
        served = self.model.allocate(holder, len(rest))
        new = self.table.update(HOLDERS[holder], PageRefs.of(()), NO_SEALS, len(rest))
        assert (new is not None) == served
        seals, parent = [], pages[-1] if pages else None
        for page, page_hash in zip(new or (), rest, strict=served):
            self.model.take(holder, [page])
            seals.append(Seal(page, page_hash, parent))
            pages.append(page)
            parent = page
        seals = seals[: len(seals) - self.random.randint(0, 1)]
        self.table.update(HOLDERS[holder], PageRefs.of(()), Seals.of(seals), 0)
        for seal in seals:
            self.model.seal(*seal[:3])
        if self.random.random() < 0.6:
            self.release(holder, pages)

    def release(self, holder: str, pages: list[PageRef]) -> None:
        self.random.shuffle(pages)
        assert self.table.update(HOLDERS[holder], PageRefs.of(pages), NO_SEALS, 0) is not None
        self.model.drop(holder, Counter(pages))

    def release_some(self, holder: str) -> None:
        owned = sorted(self.model.holds(holder).elements())
        self.release(holder, self.random.sample(owned, self.random.randint(0, len(owned))))

    def die(self, holder: str) -> None:
        assert self.table.release_all(HOLDERS[holder]) == self.model.holds(holder).total()
        self.model.drop_all_if_known(holder)

    def restart(self, holder: str) -> None:
        """The store is killed; one client claims what it held, the others are gone."""
        owned = sorted(self.model.holds(holder).elements())
        self.table = PageTable(self.headers)
        self.model.restart()
        self.table.adopt(HOLDERS[holder], PageRefs.of(owned))
        self.model.holds(holder).update(ref for ref in owned if ref in self.model.sealed)
        for other, number in HOLDERS.items():
            if other != holder:
                self.table.release_all(number)
                self.model.drop_all_if_known(other)
        self.table.release_all(THE_STORE)
        self.model.drop_all(RESTARTED)
        assert self.held(holder) == sum(Counter(owned).values())

    def held(self, holder: str) -> int:
        return self.table.held_by(HOLDERS[holder])

    def step(self) -> None:
        holder = self.random.choice(sorted(HOLDERS))
        kinds = (self.request, self.release_some, self.die, self.restart)
        self.random.choices(kinds, (12, 6, 2, 1))[0](holder)
        self.table.check_integrity()
        counts = self.table.counts
        assert (counts.free, counts.cached) == (self.model.free, len(self.model.stale))
        sealed = {
            PageRef(page, int(header["generation"])): header["hash"].tobytes()[: header["hash_bytes"]]
            for page, header in enumerate(self.headers)
            if header["state"] == 2
        }
        assert sealed == {ref: page.page_hash for ref, page in self.model.sealed.items()}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_table_lives_as_the_model_says(seed: int) -> None:
    life = Life(seed)
    for _ in range(STEPS):
        life.step()
