"""Fetches beside the computation: of layers that follow another choice, and of all where hits come first.

Knows work and streams; neither plans nor bytes. A miss plan is exact, so nothing is fetched in vain, and the
slots it fills are read by the layer itself alone: they may be filled as soon as the plan is there, because
whoever read them in the step before has done so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch


class Prefetch(Protocol):
    """One engine's. Calls come from its loop alone; each layer of a `start` is waited for once."""

    def start(self, work: Mapping[int, Callable[[], None]]) -> None:
        """Begin the layers' fetches, in this order, behind all that the computing stream was given so far."""

    def wait(self, layer: int) -> None:
        """What the computing stream is given from now on comes behind the fetches of `layer`."""


class AtOnce:
    """Where there is one stream: done when `start` returns."""

    def start(self, work: Mapping[int, Callable[[], None]]) -> None:
        """Layer by layer."""
        for fetch in work.values():
            fetch()

    def wait(self, layer: int) -> None:
        """Nothing is under way."""


class SideStream:
    """A stream of its own on a GPU, captured with the step that it leaves and that waits for every layer."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._known = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
        self._fetched: dict[int, torch.cuda.Event] = {}

    def start(self, work: Mapping[int, Callable[[], None]]) -> None:
        """On the side stream, each layer's behind the one before."""
        self._known.record(torch.cuda.current_stream())
        self._stream.wait_event(self._known)
        with torch.cuda.stream(self._stream):
            for layer, fetch in work.items():
                fetch()
                if layer not in self._fetched:
                    self._fetched[layer] = torch.cuda.Event()  # type: ignore[no-untyped-call]  # likewise
                self._fetched[layer].record(self._stream)

    def wait(self, layer: int) -> None:
        """An event, which the host does not wait for."""
        torch.cuda.current_stream().wait_event(self._fetched[layer])
