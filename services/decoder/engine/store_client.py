"""kvstore's calls as the engine makes them: a time-out on each, errors of the tree, patience at the start.

Knows the wire; no session and no page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc
from hotset.v1 import kvstore_pb2 as pb
from hotset.v1 import kvstore_pb2_grpc as pb_grpc

from services.contract.channel import MAX_MESSAGE_BYTES
from services.contract.errors import SetupError, Unavailable, from_rpc_error
from services.contract.wire_security import WireSecurity

_CALL_SECONDS = 2.0  # a store that hangs holds up a shutdown for three of these
_PAUSE_SECONDS = 0.2  # between tries
_MOST_HELD = MAX_MESSAGE_BYTES // 16  # references that an attach names at once, of 8 bytes: half a message
_T = TypeVar("_T")


class StoreClient:
    """Every call raises what the store raised, or Unavailable where it is out of reach."""

    def __init__(self, address: str, security: WireSecurity) -> None:
        """Connect lazily to `address`, host:port or unix:/path."""
        self.address = address
        self._channel = security.channel(address)
        self._said = security.metadata
        self._store = pb_grpc.KvStoreStub(self._channel)

    def stats(self) -> pb.StoreStats:
        """What the store holds."""
        request = pb.StoreStatsRequest()
        return _told(lambda: self._store.Stats(request, timeout=_CALL_SECONDS, metadata=self._said))

    def attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        """Open a session or take one up again, in as many calls as the pages that it holds need."""
        *first, last = _parts(request)
        for part in first:
            self._attach(part)
        return self._attach(last)

    def _attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        return _told(lambda: self._store.Attach(request, timeout=_CALL_SECONDS, metadata=self._said))

    def match(self, request: pb.MatchRequest) -> pb.MatchReply:
        """Pin pages."""
        return _told(lambda: self._store.Match(request, timeout=_CALL_SECONDS, metadata=self._said))

    def update(self, request: pb.UpdateRequest) -> pb.UpdateReply:
        """A step's changes."""
        return _told(lambda: self._store.Update(request, timeout=_CALL_SECONDS, metadata=self._said))

    def heartbeat(self, request: pb.HeartbeatRequest, seconds: float = _CALL_SECONDS) -> pb.HeartbeatReply:
        """Renew the lease; wait no longer than `seconds`."""
        limit = min(seconds, _CALL_SECONDS)
        return _told(lambda: self._store.Heartbeat(request, timeout=limit, metadata=self._said))

    def detach(self, request: pb.DetachRequest) -> pb.DetachReply:
        """End a session."""
        return _told(lambda: self._store.Detach(request, timeout=_CALL_SECONDS, metadata=self._said))

    def patiently(self, seconds: float, call: Callable[[], _T], called_off: threading.Event) -> _T:
        """Repeat a call while the store cannot be reached, up to `seconds`.

        Raises:
            SetupError: no answer in time; it says what to do.
            Unavailable: called off.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                return call()
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"no kvstore at {self.address} ({error}); start `python -m services.kvstore` first, "
                        "or say where it is with --kvstore"
                    ) from error
                if called_off.wait(_PAUSE_SECONDS):
                    raise

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


def _parts(request: pb.AttachRequest) -> list[pb.AttachRequest]:
    """The calls that an attach is made in: itself, unless it names more pages than a message takes."""
    pages, generations = request.held_pages.pages, request.held_pages.generations
    if len(pages) <= _MOST_HELD:
        return [request]
    bare = pb.AttachRequest()
    bare.CopyFrom(request)
    bare.ClearField("held_pages")
    parts = []
    for begins in range(0, len(pages), _MOST_HELD):
        part, ends = pb.AttachRequest(), begins + _MOST_HELD
        part.CopyFrom(bare)
        part.held_pages.pages.extend(pages[begins:ends])
        part.held_pages.generations.extend(generations[begins:ends])
        part.held_before, part.more_held = begins, ends < len(pages)
        parts.append(part)
    return parts


def _told(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
