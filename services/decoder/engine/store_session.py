"""The engine's session with kvstore: attach, one exchange a step, a heartbeat, and taking it up again.

Knows the wire and which pages are held; not which sequence holds them. The loop's thread exchanges, a
thread of this object beats; a lock keeps the two apart.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from hotset.v1 import kvstore_pb2 as pb

from services.contract.errors import (
    HotsetError,
    NotFound,
    SetupError,
    StaleReference,
    StateConflict,
    Unavailable,
)
from services.contract.file_lock import FileLock
from services.contract.layout import LAYOUT_VERSION, ArenaLayout
from services.contract.planes import Plane, planes_to_wire
from services.contract.wire_security import NO_SECURITY, WireSecurity
from services.decoder.engine.held_pages import HeldPages
from services.decoder.engine.host_pages import HostPage, SealOrder
from services.decoder.engine.page_refs import from_wire, marked, seals_to_wire, to_wire, tokens_to_wire
from services.decoder.engine.store_client import StoreClient

_log = logging.getLogger(__name__)
_MOST_NAMED_TOKENS = 2**21  # in a match: half of the longest message; nobody is told of pages behind them


class StoreSession:
    """A mapped client of one kvstore; implements HostPages once `attach` has returned."""

    _kind: ClassVar[pb.ClientKind.ValueType] = pb.CLIENT_KIND_MAPPED

    def __init__(self, address: str, client_name: str, security: WireSecurity = NO_SECURITY) -> None:
        """Connect lazily to `address` (host:port or unix:/path); `client_name` is stable over restarts."""
        self._name = client_name
        self._token = secrets.token_hex(16)
        self._store = StoreClient(address, security)
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._beating: threading.Thread | None = None
        self._seat: FileLock | None = None
        self._request = pb.AttachRequest()
        self._reply = pb.AttachReply()
        self._inode = 0
        self._held = HeldPages()
        self._stash: list[HostPage] = []  # taken by an exchange whose answer came late
        self._unanswered: pb.UpdateRequest | None = None
        self._doubtful = False  # a match went unanswered
        self._sequence = 0
        self._free = 0

    def find(self, wait_seconds: float) -> Path:
        """Where the store's arena lies; waits for a store that is still starting, `wait_seconds` at most.

        Raises:
            SetupError: no store in time.
        """
        return Path(self._store.patiently(wait_seconds, self._store.stats, self._ending).arena_path)

    def attach(
        self, fingerprint: bytes, page_tokens: int, planes: Iterable[Plane], wait_seconds: float
    ) -> ArenaLayout:
        """Open the session, waiting for a store that is still starting.

        Args:
            fingerprint: 32 bytes that say what KV bytes mean.
            page_tokens: tokens a page.
            planes: what a page keeps.
            wait_seconds: how long an unreachable store is waited for.

        Raises:
            SetupError: no store in time, or one whose arena is laid out for something else.
        """
        layout_planes = tuple(planes)
        self._sit_down(wait_seconds)
        self._request = pb.AttachRequest(
            client_name=self._name,
            kind=self._kind,
            model_fingerprint=fingerprint,
            page_tokens=page_tokens,
            planes=planes_to_wire(layout_planes),
            session_token=self._token,
        )
        try:
            self._reply = self._store.patiently(
                wait_seconds, lambda: self._store.attach(self._request), self._ending
            )
        except StateConflict as error:
            raise SetupError(f"kvstore at {self._store.address} refused: {error}") from error
        reply = self._reply
        if reply.layout_version != LAYOUT_VERSION:
            raise SetupError(
                f"kvstore lays pages out by version {reply.layout_version}, not {LAYOUT_VERSION}"
            )
        layout = ArenaLayout.fit(reply.arena_bytes, page_tokens, layout_planes)
        if layout.page_count != reply.page_count:
            raise SetupError(f"kvstore counts {reply.page_count} pages, this engine {layout.page_count}")
        self._free = reply.page_count
        self._inode = self._inode_of(reply)
        self._beating = threading.Thread(target=self._beat, name="store-heartbeat", daemon=True)
        self._beating.start()
        return layout

    def _sit_down(self, wait_seconds: float) -> None:
        """Hold the lock that tells the store that this process lives."""
        arena = self.find(wait_seconds)
        self._seat = FileLock(arena.parent / "sessions" / f"{self._token}.lock")
        try:
            self._seat.path.parent.mkdir(exist_ok=True)
            self._seat.acquire()
        except OSError as error:
            raise SetupError(
                f"cannot write {self._seat.path}: {error.strerror}; the engine must run on kvstore's node, "
                "as the same user, with the same tmpfs mounted; or run it with --store-access remote"
            ) from error

    def _inode_of(self, reply: pb.AttachReply) -> int:
        return Path(reply.arena_path).stat().st_ino

    @property
    def arena_path(self) -> Path:
        """The arena file."""
        return Path(self._reply.arena_path)

    @property
    def total(self) -> int:
        """Pages of the arena."""
        return self._reply.page_count

    @property
    def free(self) -> int:
        """Pages that an exchange can get, as far as known."""
        return self._free + len(self._stash)

    @property
    def held(self) -> int:
        """References to pages that this session holds."""
        return self._held.count

    @property
    def lent(self) -> int:
        """As HostPages says."""
        return self._held.count - len(self._stash)

    def match(self, page_hashes: Sequence[bytes], prompt: Sequence[int] = ()) -> list[HostPage]:
        """As HostPages says.

        Raises:
            Unavailable: the store is out of reach, or was restarted a moment ago.
        """
        with self._lock:
            self._settle()
            session, epoch = self._reply.session_id, self._reply.epoch
            request = pb.MatchRequest(session_id=session, epoch=epoch, page_hashes=page_hashes)
            if self._reply.wants_tokens:
                size = self._request.page_tokens
                most = min(len(page_hashes), len(prompt) // size, _MOST_NAMED_TOKENS // size)
                request.tokens = tokens_to_wire(prompt[: most * size])
            try:
                reply = self._store.match(request)
            except Unavailable:
                self._doubtful = True
                raise
            except (StaleReference, NotFound):
                self._take_up_again()
                raise Unavailable("kvstore was restarted; the session has been taken up again") from None
            pages = from_wire(reply.pages)
            self._free = reply.free_pages + reply.cached_pages
            self._held.take(pages)
            self._held.note_sealed(pages)
            return pages

    def exchange(
        self, give: list[HostPage], want: int, seals: Sequence[SealOrder] = ()
    ) -> list[HostPage] | None:
        """As HostPages says. Seals that a restart of the store has made impossible are left out.

        Raises:
            Unavailable: the store is out of reach; repeat the call, with other wishes if need be.
            SetupError: the store came back with another arena; this engine cannot go on.
        """
        with self._lock:
            self._settle()
            left = self._held.still_here(give)  # the others went with an answer that came late
            sealing = self._held.possible(seals)
            lacking = max(0, want - len(self._stash))
            if left or sealing or lacking:
                self._sequence += 1
                self._unanswered = pb.UpdateRequest(
                    session_id=self._reply.session_id,
                    epoch=self._reply.epoch,
                    sequence=self._sequence,
                    releases=to_wire(left),
                    seals=seals_to_wire(sealing, with_tokens=self._reply.wants_tokens),
                    allocate_pages=lacking,
                )
                self._settle(late=False)
            self._held.told(give)
            if want > len(self._stash):
                return None
            pages, self._stash = self._stash[:want], self._stash[want:]
            return pages

    def close(self) -> None:
        """End the session; a store that is out of reach finds out by the lock."""
        self._ending.set()
        if self._beating is not None:
            self._beating.join()
        with self._lock:
            if self._reply.session_id:
                request = pb.DetachRequest(session_id=self._reply.session_id, epoch=self._reply.epoch)
                try:
                    self._store.detach(request)
                except HotsetError as error:
                    _log.warning("detach_failed error=%s", error)
            if self._seat is not None:
                self._seat.release()
        self._store.close()

    def _settle(self, *, late: bool = True) -> None:
        """Get the answer to the last update, sending it again if none came; `late`, its caller has gone."""
        if self._doubtful:
            self._take_up_again()  # which tells the store what we hold, so that it drops what else it pinned
        request = self._unanswered
        if request is None:
            return
        try:
            reply = self._store.update(request)
        except (StaleReference, NotFound):
            self._take_up_again()
            raise Unavailable("kvstore was restarted; the session has been taken up again") from None
        except StateConflict as error:
            # It did nothing and did not count the number, so the next update may ask for something else.
            self._unanswered = None
            self._sequence -= 1
            raise Unavailable(f"kvstore gives no pages: {error}") from error
        self._unanswered = None
        self._free = reply.free_pages + reply.cached_pages
        self._held.let_go(from_wire(request.releases), late=late)
        self._held.note_sealed(from_wire(request.seals.pages))
        taken = from_wire(reply.pages)
        self._held.take(taken)
        self._stash += taken

    def _beat(self) -> None:
        """Renew the lease until the end."""
        while not self._ending.wait(self._reply.lease_ms / 3000):
            with self._lock:
                try:
                    self._heartbeat()
                except Unavailable as error:
                    _log.warning("store_unreachable address=%s error=%s", self._store.address, error)
                except HotsetError as error:
                    _log.warning("session_lost error=%s", error)
                    self._reattach_quietly()

    def _heartbeat(self) -> None:
        request = pb.HeartbeatRequest(session_id=self._reply.session_id, epoch=self._reply.epoch)
        self._store.heartbeat(request)

    def _reattach_quietly(self) -> None:
        try:
            self._take_up_again()
        except HotsetError as error:
            _log.error("session_not_taken_up error=%s", error)

    def _take_up_again(self) -> None:
        """Attach with the same token, after the store was restarted."""
        lost, self._unanswered = self._unanswered, None
        if lost is not None:
            # Whether or not the old store did what this asked, what it was to release and what it may have
            # allocated come back with the attach, for we claim neither.
            self._held.let_go(from_wire(lost.releases), late=True)
        self._request.held_pages.CopyFrom(to_wire(self._held.references()))
        self._reply = reply = self._claim()
        self._sequence = 0
        self._doubtful = False
        self._held.only_sealed(marked(self._request.held_pages, reply.sealed_held))
        _log.info("session_taken_up epoch=%d pages=%d", reply.epoch, self.held)

    def _claim(self) -> pb.AttachReply:
        """Attach with what is held."""
        try:
            reply = self._store.attach(self._request)
        except StateConflict as error:
            raise SetupError(f"kvstore came back without this engine's pages: {error}") from error
        if self._inode_of(reply) != self._inode:
            raise SetupError("kvstore came back with another arena; this engine must start anew")
        return reply
