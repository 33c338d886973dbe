"""The gRPC face: messages to orders, answers to messages.

Decides nothing: the store does, and the interceptor of contract/rpc_errors.py maps what it raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import grpc
from hotset.v1 import kvstore_pb2 as pb
from hotset.v1 import kvstore_pb2_grpc as rpc

from services.contract.errors import InvalidRequest
from services.contract.file_header import FileHeader
from services.contract.layout import LAYOUT_VERSION
from services.contract.planes import planes_from_wire
from services.kvstore.data_plane import DataPlane
from services.kvstore.orders import AttachOrder, ClientKind, Seal, UpdateOrder, check_chain
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.store import Store

_KINDS = {pb.CLIENT_KIND_MAPPED: ClientKind.MAPPED, pb.CLIENT_KIND_REMOTE: ClientKind.REMOTE}

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class KvStoreServicer(rpc.KvStoreServicer):
    """Every method runs to its end in one turn of the event loop, so the store sees one call at a time.

    Only a match may wait, before it begins: for pages of other stores.
    """

    def __init__(self, store: Store, data: DataPlane) -> None:
        self._store = store
        self._data = data

    async def Attach(self, request: pb.AttachRequest, context: _Context) -> pb.AttachReply:
        if request.kind not in _KINDS:
            raise InvalidRequest("kind must be CLIENT_KIND_MAPPED or CLIENT_KIND_REMOTE")
        header = FileHeader(request.page_tokens, request.model_fingerprint, planes_from_wire(request.planes))
        attached = self._store.attach(
            AttachOrder(
                client_name=request.client_name,
                kind=_KINDS[request.kind],
                token=request.session_token,
                header=header,
                held=_refs(request.held_pages),
                reads_only=request.reads_only,
            )
        )
        reply = pb.AttachReply(
            session_id=attached.session_id,
            epoch=attached.epoch,
            arena_path=attached.arena_path,
            arena_bytes=attached.arena_bytes,
            layout_version=LAYOUT_VERSION,
            page_count=attached.page_count,
            lease_ms=attached.lease_ms,
            data_key=attached.data_key,
            arena_inode=Path(attached.arena_path).stat().st_ino,
            data_faces=[pb.DataFace(transport=name, address=where) for name, where in self._data.faces],
        )
        _write(attached.sealed, reply.sealed_pages)
        return reply

    async def Match(self, request: pb.MatchRequest, context: _Context) -> pb.MatchReply:
        hashes = list(request.page_hashes)
        if self._data.asks and not request.local_only:
            self._store.heartbeat(request.session_id, request.epoch)
            check_chain(hashes)
            await self._data.fill(hashes)
        found = self._store.match(request.session_id, request.epoch, hashes)
        counts = self._store.page_counts
        reply = pb.MatchReply(free_pages=counts.free, cached_pages=counts.cached)
        _write(found, reply.pages)
        return reply

    async def Update(self, request: pb.UpdateRequest, context: _Context) -> pb.UpdateReply:
        order = UpdateOrder(
            sequence=request.sequence,
            releases=_refs(request.releases),
            seals=tuple(_seal(seal) for seal in request.seals),
            allocate_pages=request.allocate_pages,
        )
        updated = self._store.update(request.session_id, request.epoch, order)
        reply = pb.UpdateReply(
            shortfall_pages=updated.shortfall_pages,
            free_pages=updated.free_pages,
            cached_pages=updated.cached_pages,
        )
        _write(updated.pages, reply.pages)
        return reply

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: _Context) -> pb.HeartbeatReply:
        lease_ms = self._store.heartbeat(request.session_id, request.epoch)
        return pb.HeartbeatReply(lease_ms=lease_ms, draining=self._store.draining)

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


def _refs(messages: Any) -> PageRefs:
    return PageRefs.of_numbers([number for m in messages for number in (m.page, m.generation)])


def _write(refs: PageRefs, messages: Any) -> None:
    """Append `refs` to a repeated field. Field by field: keywords cost 3 times as much, 1.3 ms for 2,000."""
    add = messages.add
    for page, generation in zip(refs.pages.tolist(), refs.generations.tolist(), strict=True):
        message = add()
        message.page = page
        message.generation = generation


def _ref(message: pb.PageRef) -> PageRef:
    return PageRef(message.page, message.generation)


def _seal(message: pb.Seal) -> Seal:
    parent = _ref(message.parent) if message.HasField("parent") else None
    return Seal(_ref(message.page), message.page_hash, parent)
