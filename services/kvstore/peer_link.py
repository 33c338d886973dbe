"""The control wire to one other store: attach there as a reader, pin pages by their hashes, let go of them.

Knows gRPC and the session; no bytes and no pages of our own. There is no heartbeat: a session that is not
used ends with its lease, its pins with it, and the next call opens another.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from hotset.v1 import kvstore_pb2 as pb
from hotset.v1 import kvstore_pb2_grpc as rpc

from services.contract.errors import NotFound, StaleReference, StateConflict
from services.contract.file_header import FileHeader
from services.contract.planes import planes_to_wire
from services.contract.rpc_call import answer_of
from services.contract.transport.frame import Credentials
from services.contract.wire_security import WireSecurity
from services.kvstore.page_fetch import Face
from services.kvstore.page_refs import PageRefs
from services.kvstore.wire import refs_from_wire, refs_to_wire


class PeerLink:
    """Of one event loop."""

    def __init__(self, address: str, client_name: str, security: WireSecurity) -> None:
        """Connect lazily to the peer's gRPC address; `client_name` is this store's, at this peer."""
        self.address = address
        self._name = client_name
        self._token = secrets.token_hex(16)
        self._channel = security.aio_channel(address)
        self._said = security.metadata
        self._store = rpc.KvStoreStub(self._channel)
        self._header: FileHeader | None = None
        self._session: pb.AttachReply | None = None
        self._sequence = 0
        self._releasing = asyncio.Lock()

    async def known(self, header: FileHeader, page_hashes: Sequence[bytes], seconds: float) -> int:
        """How long a prefix of a chain the peer says it has, within `seconds`; a hint, for nothing is pinned.

        Raises:
            As `match`.
        """
        return (await self._asked(header, page_hashes, seconds, count_only=True)).known_pages

    async def match(self, header: FileHeader, page_hashes: Sequence[bytes], seconds: float) -> PageRefs:
        """Pin the longest prefix of a chain that the peer has, within `seconds`; the references are its own.

        Raises:
            StateConflict: its arena is laid out for something else. HotsetError: it is out of reach.
        """
        return refs_from_wire((await self._asked(header, page_hashes, seconds)).pages)

    def face(self, transport: str) -> Face:
        """Where the session's pages can be read.

        Raises:
            StateConflict: not by this transport.
        """
        assert self._session is not None, "match comes first"
        session = self._session
        credentials = Credentials(session.session_id, session.epoch, session.data_key)
        if transport == "mapped":
            return Face(self.address, session.arena_path.encode(), credentials)
        offered = {face.transport: face.address for face in session.data_faces}
        if transport not in offered:
            raise StateConflict(
                f"the peer {self.address} offers {', '.join(offered) or 'no data plane'}, not {transport}; "
                "start both with the same --data-transport"
            )
        return Face(self.address, offered[transport], credentials)

    async def release(self, refs: PageRefs, seconds: float) -> None:
        """Let go of pages; where that fails the session is given up, and its lease does it.

        Raises:
            HotsetError: the peer is out of reach, or knows nothing of them.
        """
        session = self._session
        if session is None or not len(refs):
            return
        async with self._releasing:
            if session is not self._session:
                return  # over already, and its pins with it
            self._sequence += 1
            request = pb.UpdateRequest(
                session_id=session.session_id,
                epoch=session.epoch,
                sequence=self._sequence,
                releases=refs_to_wire(refs),
            )
            try:
                await answer_of(self._store.Update(request, timeout=seconds, metadata=self._said))
            except Exception:
                if session is self._session:
                    self._session = None
                raise

    def forget(self) -> None:
        """Give the session up: what it pins comes back with the next attach, or with its lease."""
        self._session = None

    async def close(self) -> None:
        """Hang up; the lease ends the session."""
        await self._channel.close()

    async def _asked(
        self, header: FileHeader, page_hashes: Sequence[bytes], seconds: float, *, count_only: bool = False
    ) -> pb.MatchReply:
        deadline = time.monotonic() + seconds  # of all calls together
        for again in (False, True):
            session = await self._attached(header, _left(deadline))
            try:
                return await answer_of(
                    self._store.Match(
                        pb.MatchRequest(
                            session_id=session.session_id,
                            epoch=session.epoch,
                            page_hashes=page_hashes,
                            local_only=True,
                            count_only=count_only,
                        ),
                        timeout=_left(deadline),
                        metadata=self._said,
                    )
                )
            except (NotFound, StaleReference):  # the lease has ended, or the peer was restarted
                self._session = None
                if again:
                    raise
        raise AssertionError("the second attempt returns or raises")

    async def _attached(self, header: FileHeader, seconds: float) -> pb.AttachReply:
        if self._session is not None and self._header == header:
            return self._session
        self._session = await answer_of(
            self._store.Attach(
                pb.AttachRequest(
                    client_name=self._name,
                    kind=pb.CLIENT_KIND_REMOTE,
                    model_fingerprint=header.fingerprint,
                    page_tokens=header.page_tokens,
                    planes=planes_to_wire(header.planes),
                    session_token=self._token,
                    reads_only=True,
                ),
                timeout=seconds,
                metadata=self._said,
            )
        )
        self._header, self._sequence = header, 0
        return self._session


def _left(deadline: float) -> float:
    """Seconds; gRPC wants some."""
    return max(0.001, deadline - time.monotonic())


Dial = Callable[[str], PeerLink]
"""A peer's address to a link."""
