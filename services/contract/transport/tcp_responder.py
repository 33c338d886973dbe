"""Answers over plain TCP connections, one thread for all of them.

Knows sockets and answering. A connection's next request is read when its last answer has left, so what lies
in memory for it is one answer; and a stranger's only as far as its header.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from services.contract.errors import SetupError
from services.contract.transport.answering import Answer, Answering
from services.contract.transport.checksum import load_checksum
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import FRAME_BYTES, MAX_REQUEST_BYTES, read_frame
from services.contract.transport.protocol import Service
from services.contract.transport.staging import Staging
from services.contract.transport.tcp_address import parse_address, write_address

_log = logging.getLogger(__name__)
_SWEEP_SECONDS = 1.0
_MOST_CONNECTIONS = 256
_PIECE_BYTES = 64 * 1024


@dataclass(slots=True)
class _Peer:
    """A connection: what of a request has come, what of an answer has left."""

    socket: socket.socket
    moved: float  # when the request in the inbox began, or bytes of an answer last left; monotonic
    inbox: bytearray = field(default_factory=bytearray)
    session: int | None = None  # of its latest request
    answer: Answer | None = None
    sent: int = 0
    events: int = selectors.EVENT_READ  # waited for


class TcpResponder:
    """A Responder; see protocol.py."""

    def __init__(
        self, listen: bytes, service: Service, counters: TransportCounters, stall_seconds: float = 10.0
    ) -> None:
        """Listen on `listen`, host:port, port 0 for any.

        Who takes nothing for `stall_seconds`, or needs longer to send a request, is let go.

        Raises:
            SetupError: the address cannot be had, or xxhash is not installed.
        """
        self._counters = counters
        self._staging = Staging()
        self._answering = Answering(service, load_checksum(), self._staging, counters)
        self._stall_seconds = stall_seconds
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        try:
            self._listening = socket.create_server(parse_address(listen), family=_family(listen))
        except (OSError, ValueError, OverflowError) as error:
            raise SetupError(
                f"cannot listen on {listen.decode()} for peers: {error}; choose another --data-listen"
            ) from error
        self._listening.setblocking(False)
        self.address = write_address(self._listening)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="data-tcp", daemon=True)
        self._thread.start()

    @property
    def held_bytes(self) -> int:
        """As the Protocol says."""
        return self._staging.taken_bytes

    def close(self) -> None:
        """As the Protocol says."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        os.close(self._bell)

    def _run(self) -> None:
        swept = time.monotonic()
        while not self._closing:
            for key, _ in self._selector.select(_SWEEP_SECONDS):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fd in self._peers:
                    self._serve(self._peers[key.fd])
            if time.monotonic() - swept >= _SWEEP_SECONDS:
                swept = time.monotonic()
                self._sweep(swept)
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._selector.close()
        self._listening.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # gone again already
            return
        except OSError as error:  # no descriptor or memory is left: it would be tried without a pause
            _log.warning("accept_failed error=%s", error)
            self._selector.unregister(self._listening)
            return
        if len(self._peers) >= _MOST_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[connection.fileno()] = _Peer(connection, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, peer: _Peer) -> None:
        """Read or write what can be, and let go of a peer that is gone or talks nonsense."""
        try:
            if peer.answer is None:
                piece = peer.socket.recv(_PIECE_BYTES)
                if not piece:
                    raise ConnectionResetError
                if not peer.inbox:
                    peer.moved = time.monotonic()
                peer.inbox += piece
            while peer.answer is not None or self._begin(peer):
                self._write(peer)
            self._await(peer, selectors.EVENT_READ)
        except BlockingIOError:
            self._await(peer, selectors.EVENT_READ if peer.answer is None else selectors.EVENT_WRITE)
        except OSError:
            if peer.answer is not None:
                self._counters.fault(Fault.LOST)
            self._drop(peer)
        except TransportFault as error:
            _log.warning("peer_refused fault=%s error=%s", error.fault.value, error)
            self._drop(peer)
        except Exception:  # noqa: BLE001  # a fault of ours costs this peer its connection, not all of theirs
            _log.exception("peer_failed")
            self._drop(peer)

    def _begin(self, peer: _Peer) -> bool:
        """Answer the first request in the inbox; whether all of one had come."""
        if len(peer.inbox) < FRAME_BYTES:
            return False
        try:
            header = read_frame(memoryview(bytes(peer.inbox[:FRAME_BYTES])), MAX_REQUEST_BYTES)
        except TransportFault as error:
            self._counters.fault(error.fault)
            raise
        length = FRAME_BYTES + header.length
        if len(peer.inbox) < length:
            refusal = self._answering.stranger(header)
            if refusal is not None:
                raise TransportFault(refusal[0], str(refusal[1]))
            return False
        frame, body = self._answering.open(memoryview(bytes(peer.inbox[:length])))
        del peer.inbox[:length]
        peer.session = frame.session
        peer.answer, peer.sent = self._answering.answer(frame, body), 0
        return True

    def _write(self, peer: _Peer) -> None:
        """Send what the socket takes.

        Raises:
            BlockingIOError: it takes no more now.
        """
        answer = peer.answer
        assert answer is not None, "only a peer that is owed an answer is written to"
        while peer.sent < answer.length:
            peer.sent += peer.socket.send(answer.buffer[peer.sent : answer.length])
            peer.moved = time.monotonic()
        self._staging.give(answer.buffer)
        peer.answer = None

    def _await(self, peer: _Peer, events: int) -> None:
        if peer.events != events:
            peer.events = events
            self._selector.modify(peer.socket, events)

    def _sweep(self, now: float) -> None:
        """Let go of peers that take nothing or never end, or whose session is over; accept again."""
        if self._listening not in self._selector.get_map():
            self._selector.register(self._listening, selectors.EVENT_READ)
        for peer in list(self._peers.values()):
            if now - peer.moved < self._stall_seconds:
                continue
            if peer.answer is not None:
                self._counters.fault(Fault.DEADLINE)
                self._drop(peer)
            elif peer.inbox or peer.session is None or not self._answering.alive(peer.session):
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.socket.fileno()]
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.answer is not None:
            self._staging.give(peer.answer.buffer)  # the kernel has copied what it took
            peer.answer = None


def _family(listen: bytes) -> socket.AddressFamily:
    return socket.AF_INET6 if listen.startswith(b"[") else socket.AF_INET
