"""A UCX responder's requesters: an endpoint each, and the answers on their way.

Knows endpoints, buffers and the numbers that requesters chose; not what is asked. Used by the responder's
thread only, but for `lanes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.contract.transport.staging import Staging
from services.contract.transport.ucx_worker import UcxWorker

_MOST_CLIENTS = 1024


@dataclass(slots=True)
class Arrival:
    """A message that lands in `buffer`, which is UCX's until `request` is done."""

    request: Any
    buffer: memoryview
    length: int
    number: int  # the sender's
    since: float  # monotonic


@dataclass(slots=True)
class Sending:
    """An answer that leaves from `buffer`, which is UCX's until `request` is done."""

    number: int
    buffer: memoryview
    since: float  # monotonic
    request: Any = None


@dataclass(slots=True)
class _Client:
    endpoint: Any
    session: int
    lanes: tuple[str, ...]


class Clients:
    """Of one responder."""

    def __init__(self, worker: UcxWorker, staging: Staging) -> None:
        self._worker = worker
        self._staging = staging
        self._clients: dict[int, _Client] = {}
        self._sendings: list[Sending] = []
        self.lanes: tuple[str, ...] = ()  # of the clients there are; replaced, never changed
        self.held_bytes = 0  # of answers on their way

    def __len__(self) -> int:
        return len(self._clients)

    def session(self, number: int) -> int | None:
        """Whose requests come from requester `number`; None if it has not said hello."""
        client = self._clients.get(number)
        return None if client is None else client.session

    def add(self, number: int, session: int, address: bytes, now: float) -> bool:
        """Connect to a requester's worker; False if that cannot be done."""
        if number in self._clients or len(self._clients) >= _MOST_CLIENTS:
            return False
        try:
            endpoint = self._worker.connect(address)
        except ValueError:
            return False
        self._clients[number] = _Client(endpoint, session, self._worker.lanes(endpoint))
        self._note_lanes()
        return True

    def under_way(self, number: int) -> int:
        """Answers to `number` that have not left yet."""
        return sum(sending.number == number for sending in self._sendings)

    def send(self, sending: Sending, length: int, tag: int) -> bool:
        """Send `length` bytes of an answer's buffer, which comes back to staging; False: the client left."""
        client = self._clients.get(sending.number)
        try:
            if client is None or not client.endpoint.alive:
                raise ValueError("the requester is gone")
            sending.request = self._worker.send(client.endpoint, sending.buffer[:length], tag)
        except ValueError:
            self._staging.give(sending.buffer)
            self.drop(sending.number)
            return False
        self._sendings.append(sending)
        self.held_bytes += len(sending.buffer)
        return True

    def reap(self) -> bool:
        """Take back the buffers of answers that have left, or never will; whether there were any."""
        done = [sending for sending in self._sendings if sending.request.completed]
        for sending in done:
            self._sendings.remove(sending)
            self._staging.give(sending.buffer)
            self.held_bytes -= len(sending.buffer)
        return bool(done)

    def stalled(self, before: float) -> set[int]:
        """Requesters that have not taken an answer of before `before`."""
        return {s.number for s in self._sendings if s.since < before and s.number in self._clients}

    def gone(self, alive: Callable[[int], bool]) -> list[int]:
        """Requesters whose endpoint has failed or whose session is over."""
        return [
            number
            for number, client in self._clients.items()
            if not client.endpoint.alive or not alive(client.session)
        ]

    def drop(self, number: int) -> None:
        """Let go of a requester; its answers end by themselves within a few turns, and `reap` sees them."""
        client = self._clients.pop(number, None)
        if client is not None:
            self._worker.disconnect(client.endpoint)
            self._note_lanes()

    def close(self) -> None:
        """Let go of all; buffers still on their way are given up."""
        for number in list(self._clients):
            self.drop(number)
        self.reap()
        for sending in self._sendings:
            self._staging.drop(sending.buffer)

    def _note_lanes(self) -> None:
        self.lanes = tuple(sorted({lane for client in self._clients.values() for lane in client.lanes}))
