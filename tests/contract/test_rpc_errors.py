"""Errors of the tree travel over real servers, sync and asyncio, and arrive as what they were."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from hotset.v1 import engine_pb2 as pb
from hotset.v1 import engine_pb2_grpc as rpc

from services.contract.channel import CLIENT_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS
from services.contract.errors import (
    HotsetError,
    InvalidRequest,
    NoRoom,
    NotFound,
    SetupError,
    StaleReference,
    StateConflict,
    Unavailable,
    from_rpc_error,
)
from services.contract.rpc_errors import AioErrorInterceptor, ErrorInterceptor

KINDS = (InvalidRequest, StateConflict, StaleReference, NotFound, NoRoom, Unavailable, SetupError)


def fail(name: str) -> None:
    for kind in KINDS:
        if kind.__name__ == name:
            raise kind(f"{name}: what to do, in any script: ж")
    if name == "bug":
        raise ZeroDivisionError("secret")


class SyncEngine(rpc.EngineServicer):
    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortReply:
        fail(request.request_id)
        return pb.AbortReply()

    def Events(self, request: pb.EventsRequest, context: grpc.ServicerContext) -> Iterator[pb.EventBatch]:
        yield pb.EventBatch()
        fail("StaleReference")


class AioEngine(rpc.EngineServicer):
    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortReply:
        fail(request.request_id)
        return pb.AbortReply()


@pytest.fixture(scope="module")
def sync_port() -> Iterator[int]:
    server = grpc.server(
        futures.ThreadPoolExecutor(2), interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS
    )
    rpc.add_EngineServicer_to_server(SyncEngine(), server)  # type: ignore[abstract]  # two methods do
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_server_and_client(sync_port: int, kind: type[HotsetError]) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{sync_port}", options=CLIENT_OPTIONS) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            rpc.EngineStub(channel).Abort(pb.AbortRequest(request_id=kind.__name__))
        error = from_rpc_error(caught.value)
        assert type(error) is kind
        assert str(error) == f"{kind.__name__}: what to do, in any script: ж"
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is kind.status


def test_a_fault_of_ours_is_told_the_log_and_not_the_caller(
    sync_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        grpc.insecure_channel(f"127.0.0.1:{sync_port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
        caplog.at_level(logging.ERROR),
    ):
        rpc.EngineStub(channel).Abort(pb.AbortRequest(request_id="bug"))
    error = from_rpc_error(caught.value)
    assert type(error) is HotsetError
    assert "secret" not in str(error)
    assert "secret" in caplog.text
    assert "rpc_failed method=/hotset.v1.Engine/Abort error=ZeroDivisionError" in caplog.text


def test_a_stream_ends_with_its_error(sync_port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{sync_port}") as channel:
        events = rpc.EngineStub(channel).Events(pb.EventsRequest())
        assert next(events) == pb.EventBatch()
        with pytest.raises(grpc.RpcError) as caught:
            next(events)
        assert type(from_rpc_error(caught.value)) is StaleReference


def test_what_works_still_works_and_what_is_missing_is_unimplemented(sync_port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{sync_port}") as channel:
        stub = rpc.EngineStub(channel)
        assert stub.Abort(pb.AbortRequest(request_id="fine")) == pb.AbortReply()
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/hotset.v1.Engine/Nothing", bytes, bytes)(b"")
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_past_the_limit_is_refused_and_the_server_lives(sync_port: int) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{sync_port}") as channel:
        stub = rpc.EngineStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Abort(pb.AbortRequest(request_id="x" * (MAX_MESSAGE_BYTES + 1)))
        assert type(from_rpc_error(caught.value)) is NoRoom
        assert stub.Abort(pb.AbortRequest(request_id="fine")) == pb.AbortReply()


def test_nobody_listens() -> None:
    with grpc.insecure_channel("127.0.0.1:9") as channel, pytest.raises(grpc.RpcError) as caught:
        rpc.EngineStub(channel).Abort(pb.AbortRequest(), timeout=5)
    assert type(from_rpc_error(caught.value)) is Unavailable


def test_an_error_without_a_status_is_internal() -> None:
    assert type(from_rpc_error(grpc.RpcError("gone"))) is HotsetError


def test_asyncio_server_and_client(caplog: pytest.LogCaptureFixture) -> None:
    async def errors() -> AsyncIterator[HotsetError]:
        server = grpc.aio.server(interceptors=[AioErrorInterceptor()], options=SERVER_OPTIONS)
        rpc.add_EngineServicer_to_server(AioEngine(), server)  # type: ignore[abstract]  # one method does
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
            stub = rpc.EngineStub(channel)
            for name in (*(kind.__name__ for kind in KINDS), "bug"):
                try:
                    await stub.Abort(pb.AbortRequest(request_id=name))
                except grpc.aio.AioRpcError as error:
                    yield from_rpc_error(error)
            assert await stub.Abort(pb.AbortRequest(request_id="fine")) == pb.AbortReply()
        await server.stop(None)

    async def collect() -> list[HotsetError]:
        return [error async for error in errors()]

    with caplog.at_level(logging.ERROR):
        found = asyncio.run(collect())
    assert [type(error) for error in found] == [*KINDS, HotsetError]
    assert all("what to do" in str(error) for error in found[:-1])
    assert "secret" in caplog.text
    assert "secret" not in str(found[-1])


def test_a_second_server_on_a_taken_port_fails(sync_port: int) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1), options=SERVER_OPTIONS)
    with pytest.raises(RuntimeError, match="Failed to bind"):
        server.add_insecure_port(f"127.0.0.1:{sync_port}")
    server.stop(None).wait()
