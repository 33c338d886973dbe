"""The gRPC face: messages to orders, answers to messages.

Decides nothing: the store does, and the interceptor of contract/rpc_errors.py maps what it raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
from hotset.v1 import kvstore_pb2 as pb
from hotset.v1 import kvstore_pb2_grpc as rpc

from services.contract.errors import InvalidRequest
from services.contract.file_header import FileHeader
from services.contract.layout import LAYOUT_VERSION
from services.contract.planes import planes_from_wire
from services.kvstore.data_plane import DataPlane
from services.kvstore.held_parts import HeldParts
from services.kvstore.orders import AttachOrder, ClientKind, UpdateOrder, check_chain
from services.kvstore.store import Store
from services.kvstore.wire import refs_from_wire, refs_to_wire, seals_from_wire

_KINDS = {pb.CLIENT_KIND_MAPPED: ClientKind.MAPPED, pb.CLIENT_KIND_REMOTE: ClientKind.REMOTE}

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class KvStoreServicer(rpc.KvStoreServicer):
    """Every method runs to its end in one turn of the event loop, so the store sees one call at a time.

    Only a match may wait, before it begins: for pages of other stores.
    """

    def __init__(
        self, store: Store, data: DataPlane, held_parts: HeldParts, *, wants_tokens: bool = False
    ) -> None:
        """`wants_tokens`: whether somebody is told of pages by their tokens."""
        self._store = store
        self._held_parts = held_parts
        self._data = data
        self._wants_tokens = wants_tokens

    async def Attach(self, request: pb.AttachRequest, context: _Context) -> pb.AttachReply:
        if request.kind not in _KINDS:
            raise InvalidRequest("kind must be CLIENT_KIND_MAPPED or CLIENT_KIND_REMOTE")
        held = refs_from_wire(request.held_pages)
        if request.more_held:
            self._held_parts.add(request.session_token, held, request.held_before)
            return pb.AttachReply()
        held = self._held_parts.whole(request.session_token, held, request.held_before)
        header = FileHeader(request.page_tokens, request.model_fingerprint, planes_from_wire(request.planes))
        attached = self._store.attach(
            AttachOrder(
                client_name=request.client_name,
                kind=_KINDS[request.kind],
                token=request.session_token,
                header=header,
                held=held,
                reads_only=request.reads_only,
            )
        )
        return pb.AttachReply(
            session_id=attached.session_id,
            epoch=attached.epoch,
            arena_path=attached.arena_path,
            arena_bytes=attached.arena_bytes,
            layout_version=LAYOUT_VERSION,
            page_count=attached.page_count,
            lease_ms=attached.lease_ms,
            data_key=attached.data_key,
            arena_inode=Path(attached.arena_path).stat().st_ino,
            wants_tokens=self._wants_tokens,
            data_faces=[pb.DataFace(transport=name, address=where) for name, where in self._data.faces],
            sealed_held=np.packbits(np.isin(held.pages, attached.sealed.pages), bitorder="little").tobytes(),
        )

    async def Match(self, request: pb.MatchRequest, context: _Context) -> pb.MatchReply:
        hashes = list(request.page_hashes)
        if request.count_only:
            known = self._store.known(request.session_id, request.epoch, hashes)
            return pb.MatchReply(known_pages=known)
        if self._data.asks and not request.local_only:
            self._store.heartbeat(request.session_id, request.epoch)
            check_chain(hashes)
            await self._data.fill(hashes)
        found = self._store.match(request.session_id, request.epoch, hashes, request.tokens)
        counts = self._store.page_counts
        return pb.MatchReply(
            pages=refs_to_wire(found),
            free_pages=counts.free,
            cached_pages=counts.cached,
            known_pages=len(found),
        )

    async def Update(self, request: pb.UpdateRequest, context: _Context) -> pb.UpdateReply:
        order = UpdateOrder(
            sequence=request.sequence,
            releases=refs_from_wire(request.releases),
            seals=seals_from_wire(request.seals),
            allocate_pages=request.allocate_pages,
        )
        updated = self._store.update(request.session_id, request.epoch, order)
        return pb.UpdateReply(
            pages=refs_to_wire(updated.pages),
            shortfall_pages=updated.shortfall_pages,
            free_pages=updated.free_pages,
            cached_pages=updated.cached_pages,
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: _Context) -> pb.HeartbeatReply:
        return pb.HeartbeatReply(lease_ms=self._store.heartbeat(request.session_id, request.epoch))

    async def Detach(self, request: pb.DetachRequest, context: _Context) -> pb.DetachReply:
        return pb.DetachReply(released_pages=self._store.detach(request.session_id, request.epoch))

    async def Stats(self, request: pb.StoreStatsRequest, context: _Context) -> pb.StoreStats:
        now = self._store.snapshot()
        return pb.StoreStats(
            arena_bytes=now.arena_bytes,
            total_pages=now.pages.total,
            free_pages=now.pages.free,
            open_pages=now.pages.open,
            sealed_pages=now.pages.sealed,
            cached_pages=now.pages.cached,
            sessions=sum(now.sessions.values()),
            page_bytes=now.page_bytes,
            draining=now.draining,
            arena_path=now.arena_path,
        )

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainReply:
        return pb.DrainReply(sessions=self._store.drain())
