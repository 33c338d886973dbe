"""Sends events over ZeroMQ as vLLM does: numbered batches to whoever subscribes, old ones again on request.

Knows frames and numbers, not what an event means. The one place that imports zmq and msgspec, when it is
asked to publish. The store's event loop hands events over and never waits; a thread of this object does the
rest.

    PUB     topic | number, 8 bytes big-endian | msgpack of [seconds, [event, ...], 0]
    ROUTER  asked: "" | first number wanted
            answered, batch by batch: "" | number | msgpack, then "" | -1 | ""

A subscriber that does not read misses batches, sees so by the numbers, and asks for them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from services.contract.errors import SetupError
from services.kvstore.page_news import Event

KEPT_BATCHES = 10_000
"""That can be asked for again; of some hundred bytes a page."""
_HIGH_WATER = 10_000  # batches that wait for a subscriber that does not read; later ones it misses
_MOST_EVENTS = 256  # of a batch
_LOOK_SECONDS = 0.05  # for requests, while nothing happens
_END = (-1).to_bytes(8, "big", signed=True)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Libraries:
    """What is imported late: neither has types to check against."""

    zmq: Any
    encode: Any


class EventPublisher:
    """Listens from the moment it is made until `close`."""

    def __init__(self, address: str, replay_address: str, topic: str) -> None:
        """Arguments.

        Args:
            address: where subscribers connect, as ZeroMQ writes it; port 0 is any.
            replay_address: where batches are asked for again; empty: nowhere.
            topic: the first frame of each batch.

        Raises:
            SetupError: a package is missing, or an address cannot be had.
        """
        libraries = _load()
        self._zmq, self._encode = libraries.zmq, libraries.encode
        self._topic = topic.encode()
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._context = self._zmq.Context()
        self._sockets: list[Any] = []
        try:
            self._pub = self._bind(self._zmq.PUB, address, _HIGH_WATER)
            # ROUTER drops what a peer does not take in time; all that is kept, and the end, has to fit.
            room = KEPT_BATCHES + 1
            self._replay = self._bind(self._zmq.ROUTER, replay_address, room) if replay_address else None
        except SetupError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, ports as they were bound: for subscribers, and for requests if there are any."""
        return tuple(socket.getsockopt_string(self._zmq.LAST_ENDPOINT) for socket in self._sockets)

    def send(self, event: Event) -> None:
        """Queue an event; from any thread, and at once."""
        self._queue.put(event)

    def close(self) -> None:
        """Send what is queued, to those who take it at once, and stop listening."""
        self._queue.put(None)
        self._thread.join()
        self._context.destroy(linger=0)

    def _bind(self, kind: int, address: str, high_water: int) -> Any:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(high_water)
        socket.setsockopt(self._zmq.IPV6, int(address.startswith("tcp://[")))
        try:
            socket.bind(address)
        except self._zmq.ZMQError as error:
            raise SetupError(f"cannot publish KV events at {address}: {error}; choose another") from error
        return socket

    def _run(self) -> None:
        number, going = 0, True
        while going:
            events, going = self._next_batch()
            if events:
                name, batch = number.to_bytes(8, "big"), self._encode([time.time(), events, 0])
                number += 1
                self._kept.append((name, batch))
                self._pub.send_multipart((self._topic, name, batch))  # PUB drops; it never waits
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)

    def _next_batch(self) -> tuple[list[Event], bool]:
        """What is queued, waiting a little for the first; whether there may be more."""
        events: list[Event] = []
        try:
            while len(events) < _MOST_EVENTS:
                event = self._queue.get(timeout=0.0 if events else _LOOK_SECONDS)
                if event is None:
                    return events, False
                events.append(event)
        except queue.Empty:
            pass
        return events, True

    def _answer(self, replay: Any) -> None:
        request = replay.recv_multipart()
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            _log.warning("replay_refused frames=%d", len(request))
            return
        peer, first = request[0], request[2]
        # Numbers of 8 bytes sort as they count.
        for name, batch in self._kept:
            if name >= first:
                replay.send_multipart((peer, b"", name, batch))
        replay.send_multipart((peer, b"", _END, b""))


def _load() -> _Libraries:
    try:
        import msgspec
        import zmq
    except ImportError as error:
        raise SetupError(f"KV events need {error.name}: pip install 'hotset[events]'") from error
    return _Libraries(zmq, msgspec.msgpack.Encoder().encode)
