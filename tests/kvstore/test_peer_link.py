"""What a question to another store may cost: its time is that of all calls that it takes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from hotset.v1 import kvstore_pb2 as pb
from hotset.v1 import kvstore_pb2_grpc as rpc

from services.contract.errors import NotFound
from services.contract.rpc_errors import AioErrorInterceptor
from services.contract.wire_security import NO_SECURITY
from services.kvstore.peer_link import PeerLink
from services.kvstore.servicer import KvStoreServicer
from tests.kvstore.world import HEADER

SECONDS = 60.0
SLOW = 0.3  # an attach takes so long

_Context = grpc.aio.ServicerContext[Any, Any]


class Peer(KvStoreServicer):
    """No store behind it; it forgets the session at once, the first time."""

    def __init__(self) -> None:
        self.matches = 0

    async def Attach(self, request: pb.AttachRequest, context: _Context) -> pb.AttachReply:
        await asyncio.sleep(SLOW)
        return pb.AttachReply(session_id=1, epoch=1)

    async def Match(self, request: pb.MatchRequest, context: _Context) -> pb.MatchReply:
        self.matches += 1
        if self.matches == 1:
            raise NotFound("session 1 is not attached")
        return pb.MatchReply(known_pages=1)


def test_a_question_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []  # to each call

    class Noting(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            given.append(details.timeout)
            return await continuation(details, request)

    async def run() -> None:
        server = grpc.aio.server(interceptors=[AioErrorInterceptor()])
        rpc.add_KvStoreServicer_to_server(Peer(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        channel = grpc.aio.insecure_channel(address, interceptors=[Noting()])
        monkeypatch.setattr(type(NO_SECURITY), "aio_channel", lambda _, address: channel)
        link = PeerLink(address, "asker", NO_SECURITY)
        assert await link.known(HEADER, [bytes(16)], SECONDS) == 1
        await link.close()
        await server.stop(None)

    asyncio.run(run())
    attach, match, again, last = given
    assert attach <= SECONDS
    assert max(match, again) <= SECONDS - SLOW
    assert last <= SECONDS - 2 * SLOW
