"""Pages that come from the arena while steps run, and word of when they are there.

Knows pages and streams; not what a page is, nor who waits for it. On a GPU they come on a stream of their
own, behind all that was launched so far: whoever had the pages before has read them. Elsewhere they are there
at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from services.decoder.engine.step_plan import Arrival


def loads_beside(device: torch.device) -> bool:
    """Whether newcomers wait for what was found for them while others go on: where a copy can run beside."""
    return device.type == "cuda"


class LoadsBeside:
    """Of one engine; its loop alone calls it."""

    def __init__(self, load: Callable[[Sequence[tuple[int, int]]], None], device: torch.device) -> None:
        """`load` launches the copies of some pages, (host page, device page), on torch's current stream."""
        self._load = load
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pending: deque[tuple[Arrival, torch.cuda.Event | None]] = deque()

    def start(self, arrivals: Sequence[Arrival]) -> None:
        """Begin to load, one after the other."""
        if not arrivals:
            return
        if self._stream is None:
            for arrival in arrivals:
                self._load(arrival.loads)
                self._pending.append((arrival, None))
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for arrival in arrivals:
                self._load(arrival.loads)
                there = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
                there.record(self._stream)
                self._pending.append((arrival, there))

    def arrived(self) -> list[Arrival]:
        """What is there and was not told before."""
        told = []
        while self._pending:
            arrival, there = self._pending[0]
            if there is not None and not there.query():  # type: ignore[no-untyped-call]  # likewise
                break
            told.append(arrival)
            self._pending.popleft()
        return told

    def wait_for_one(self) -> None:
        """Until something is there that was not told, if anything is to come."""
        if self._pending and (there := self._pending[0][1]) is not None:
            there.synchronize()
