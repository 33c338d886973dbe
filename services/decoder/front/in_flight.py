"""What one life of an engine works on: whose mailbox gets which events, and what may have had a row.

Knows ids and counts; no tokens, no wire and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")


@dataclass(slots=True)
class _Request(Generic[M]):
    mailbox: M
    priority: int
    unheard: set[int]  # choices of which nothing was heard in this life: they wait, or compute their prompt
    heard: set[int]  # choices that told something and have not ended


class InFlight(Generic[M]):
    """Requests in the order in which they were handed over."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request[M]] = {}

    @property
    def choices(self) -> int:
        """Choices that have not ended."""
        return sum(len(request.unheard) + len(request.heard) for request in self._requests.values())

    def add(self, request_id: str, choices: Iterable[int], *, priority: int, mailbox: M) -> None:
        """A request is about to be handed over."""
        self._requests[request_id] = _Request(mailbox, priority, set(choices), set())

    def mailbox(self, request_id: str) -> M | None:
        """Where its events go; None once it was removed."""
        request = self._requests.get(request_id)
        return None if request is None else request.mailbox

    def heard(self, request_id: str, choice: int, *, ended: bool) -> None:
        """A choice told something, perhaps its end."""
        request = self._requests.get(request_id)
        if request is not None:
            request.unheard.discard(choice)
            request.heard.add(choice)
            if ended:
                request.heard.discard(choice)

    def remove(self, request_id: str) -> None:
        """Nobody waits for it any more."""
        self._requests.pop(request_id, None)

    def mailboxes(self) -> list[M]:
        """Each one once, the oldest first."""
        return list({id(request.mailbox): request.mailbox for request in self._requests.values()}.values())

    def may_run(self, rows: int) -> frozenset[str]:
        """Requests that may have a row: those that told something, and those whose turn was next.

        An engine does not tell when a prompt's computation begins, so rows that nobody is known to have are
        taken to be given out by priority, then age.
        """
        rows -= sum(len(request.heard) for request in self._requests.values())
        found = {name for name, request in self._requests.items() if request.heard}
        for name, request in sorted(self._requests.items(), key=lambda item: item[1].priority):
            if rows > 0 and request.unheard:
                found.add(name)
            rows -= len(request.unheard)
        return frozenset(found)
