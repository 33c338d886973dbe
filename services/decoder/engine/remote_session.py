"""The engine's session with a kvstore whose arena it cannot map: pages are held by a lease, and may be lost.

Knows the wire, and where the bytes are asked for; not how. A lease that ends while the store is out of reach
takes the pages with it: then the session is opened anew without them, and the next exchange says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from hotset.v1 import kvstore_pb2 as pb

from services.contract.errors import (
    HotsetError,
    NotFound,
    SetupError,
    StaleReference,
    StateConflict,
    Unavailable,
)
from services.contract.transport.frame import Credentials
from services.decoder.engine.host_pages import HostPage, PagesLost, SealOrder
from services.decoder.engine.store_session import StoreSession


class Face(NamedTuple):
    """Where the store answers requests for bytes, and as whom it knows us."""

    transport: str
    address: bytes
    credentials: Credentials


class RemoteSession(StoreSession):
    """A remote client of one kvstore; implements HostPages once `attach` has returned."""

    _kind: ClassVar[pb.ClientKind.ValueType] = pb.CLIENT_KIND_REMOTE
    _lost = ""  # why the pages went, until an exchange has told

    def face(self, seconds: float) -> Face:
        """Where bytes are to be asked for now: the session is alive, or is taken up again.

        Raises:
            Unavailable: the store is out of reach, or does not answer within `seconds`.
            SetupError: it has no data plane.
        """
        if not self._lock.acquire(timeout=seconds):
            raise Unavailable("kvstore is out of reach")
        try:
            session = pb.HeartbeatRequest(session_id=self._reply.session_id, epoch=self._reply.epoch)
            try:
                self._store.heartbeat(session, seconds)
            except (NotFound, StaleReference):
                self._take_up_again()
            reply = self._reply
            if not reply.data_faces:
                raise SetupError(
                    f"kvstore at {self._store.address} gives no bytes away; start it with "
                    "--data-transport tcp or ucx, or run this engine on its node with --store-access mapped"
                )
            face = reply.data_faces[0]
            said = Credentials(reply.session_id, reply.epoch, reply.data_key)
            return Face(face.transport, face.address, said)
        finally:
            self._lock.release()

    def lives(self, pages: Iterable[int]) -> list[int]:
        """The generations in which the session holds pages; one that is not held gets one that is refused."""
        return self._held.lives(pages)

    def match(self, page_hashes: Sequence[bytes], prompt: Sequence[int] = ()) -> list[HostPage]:
        """As HostPages says."""
        if self._lost:
            raise Unavailable(self._lost)  # an exchange comes first, which tells
        return super().match(page_hashes, prompt)

    def exchange(
        self, give: list[HostPage], want: int, seals: Sequence[SealOrder] = ()
    ) -> list[HostPage] | None:
        """As HostPages says.

        Raises:
            PagesLost: what the session held before is somebody else's, or will be.
        """
        with self._lock:
            lost, self._lost = self._lost, ""
            if lost:
                raise PagesLost(lost)
            return super().exchange(give, want, seals)

    def _sit_down(self, wait_seconds: float) -> None:
        """There is no lock: the lease tells."""

    def _inode_of(self, reply: pb.AttachReply) -> int:
        return reply.arena_inode

    def _claim(self) -> pb.AttachReply:
        """Attach with what is held; without, if that is gone."""
        try:
            reply = self._store.attach(self._request)
        except StateConflict as error:
            return self._claim_nothing(error)
        if self._inode_of(reply) != self._inode:
            return self._claim_nothing(StateConflict("kvstore came back with another arena"))
        return reply

    def _claim_nothing(self, why: HotsetError) -> pb.AttachReply:
        held = self._held.count
        self._held, self._stash = self._held.after_loss(self._stash), []
        self._request.ClearField("held_pages")
        pages = self._reply.page_count
        try:
            reply = self._store.attach(self._request)
        except StateConflict as error:
            raise SetupError(f"kvstore does not take this engine back: {error}") from error
        if reply.page_count != pages:
            raise SetupError(
                f"kvstore came back with {reply.page_count} pages, not {pages}; start this engine anew"
            )
        self._inode = self._inode_of(reply)
        if held:
            self._lost = (
                f"kvstore no longer has what was computed for this answer ({why}); send the request again"
            )
        return reply
