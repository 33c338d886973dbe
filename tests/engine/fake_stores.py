"""Stores in memory for a scheduler under test: one with moods, and one that two schedulers share."""

from __future__ import annotations

import random
from collections.abc import Collection

from services.contract.errors import Unavailable
from services.decoder.engine.host_pages import HostPage, LocalPages, SealOrder


class MoodyPages:
    """An arena shared with others: now and then they are quicker, or the store is out of reach."""

    def __init__(self, total: int, mood: random.Random | None) -> None:
        self.pages = LocalPages(total)
        self.mood = mood
        self.calls = 0
        self.failures = 0
        self.refusals = 0  # exchanges that got no pages

    @property
    def total(self) -> int:
        return self.pages.total

    @property
    def free(self) -> int:
        return self.pages.free

    @property
    def lent(self) -> int:
        return self.pages.lent

    def match(self, page_hashes: Collection[bytes], prompt: Collection[int] = ()) -> list[HostPage]:
        if self.mood and self.mood.random() < 0.1:
            self.failures += 1
            raise Unavailable("the store is out of reach")
        return self.pages.match(list(page_hashes))

    def exchange(
        self, give: list[HostPage], want: int, seals: Collection[SealOrder] = ()
    ) -> list[HostPage] | None:
        self.calls += 1
        chance = self.mood.random() if self.mood else 1.0
        if chance < 0.15:
            self.failures += 1
            raise Unavailable("the store is out of reach")
        if chance < 0.3 and want:
            self.failures += 1
            self.refusals += 1
            assert self.pages.exchange(give, 0, list(seals)) == []
            return None
        taken = self.pages.exchange(give, want, list(seals))
        self.refusals += taken is None
        return taken


class OneOfTwo:
    """One client of an arena that two share: it knows what was free when it last asked."""

    def __init__(self, pages: LocalPages) -> None:
        self.pages = pages
        self.free = pages.free
        self.lent = self.calls = self.refusals = 0

    @property
    def total(self) -> int:
        return self.pages.total

    def match(self, page_hashes: Collection[bytes], prompt: Collection[int] = ()) -> list[HostPage]:
        found = self.pages.match(list(page_hashes))
        self.lent += len(found)
        self.free = self.pages.free
        return found

    def exchange(
        self, give: list[HostPage], want: int, seals: Collection[SealOrder] = ()
    ) -> list[HostPage] | None:
        self.calls += 1
        taken = self.pages.exchange(give, want, list(seals))
        self.refusals += taken is None
        self.lent += len(taken or ()) - len(give)
        self.free = self.pages.free
        return taken
