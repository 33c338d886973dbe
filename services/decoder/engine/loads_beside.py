"""What newcomers wait for while steps run: pages from the arena, then the short end of a prompt.

Knows pages and streams; not what a page is. On a GPU they come on a stream of their own, behind all that was
launched so far: whoever had the pages before has read them. Elsewhere they are there at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from services.decoder.engine.prompt_tails import PromptTails
from services.decoder.engine.step_plan import Arrival
from services.decoder.kv.paged_index import PagedIndex
from services.decoder.kv.residence import Residence


def loads_beside(device: torch.device) -> bool:
    """Whether newcomers wait for what was found for them while others go on: where a copy can run beside."""
    return device.type == "cuda"


def load_kv_and_index(
    residence: Residence, index: PagedIndex | None, pages: Sequence[tuple[int, int]]
) -> None:
    """Bring what pages hold, given as (host page, device page), to the device."""
    residence.load(pages)
    if index is not None:
        index.load(pages)


class LoadsBeside:
    """Of one engine; its loop alone calls it."""

    def __init__(
        self,
        load: Callable[[Sequence[tuple[int, int]]], None],
        tails: PromptTails | None,
        device: torch.device,
    ) -> None:
        """Nothing comes yet.

        Args:
            load: launches the copies of some pages, (host page, device page), on torch's current stream.
            tails: computes the ends of prompts; None: steps do.
            device: where pages come to.
        """
        self._load = load
        self.tails = tails
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._coming: deque[tuple[Arrival, torch.cuda.Event | None]] = deque()
        self._there: list[Arrival] = []

    def start(self, arrivals: Sequence[Arrival]) -> None:
        """Begin to load, one after the other."""
        if not arrivals:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for arrival in arrivals:
                self._load(arrival.loads)
                there = None
                if self._stream is not None:
                    there = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
                    there.record(self._stream)
                self._coming.append((arrival, there))

    def work(self) -> bool:
        """Launch a piece of what is to be computed, or wait a moment for room; False if there is none."""
        self._look()
        return self.tails is not None and self.tails.advance()

    def arrived(self) -> list[Arrival]:
        """What is there and was not told before."""
        self._look()
        told, self._there = self._there, []
        return told if self.tails is None else told + self.tails.told()

    def wait_for_one(self) -> None:
        """Until something is there that was not told, if anything is to come."""
        self._look()
        computes = self.tails is not None and self.tails.has_work
        if not (self._there or computes) and self._coming and (there := self._coming[0][1]) is not None:
            there.synchronize()
            self._look()
        if self.tails is not None and not self._there:
            self.tails.wait_for_one()

    def drop(self) -> None:
        """Steps failed, and the device was waited for: what has come is there, and nothing is computed."""
        self._look()
        if self.tails is not None:
            self.tails.drop()

    def _look(self) -> None:
        """Pass on those whose pages are there."""
        while self._coming:
            arrival, there = self._coming[0]
            if there is not None and not there.query():  # type: ignore[no-untyped-call]  # likewise
                break
            self._coming.popleft()
            if self.tails is not None and self.tails.takes(arrival.sequence):
                self.tails.add(arrival)
            else:
                self._there.append(arrival)
