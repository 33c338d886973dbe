"""What an asynchronous call comes to: an answer, an error of ours, or the caller's own cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from hotset.v1 import engine_pb2 as pb
from hotset.v1 import engine_pb2_grpc as rpc

from services.contract.errors import NotFound, Unavailable
from services.contract.rpc_call import answer_of
from services.contract.rpc_errors import AioErrorInterceptor


class Servicer(rpc.EngineServicer):
    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def Describe(self, request: pb.DescribeRequest, context: object) -> pb.EngineDescription:
        self.asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def Stats(self, request: pb.EngineStatsRequest, context: object) -> pb.EngineStats:
        return pb.EngineStats(steps=7)

    async def Abort(self, request: pb.AbortRequest, context: object) -> pb.AbortReply:
        raise NotFound("nobody has it")

    async def Submit(self, request: pb.SubmitRequest, context: object) -> pb.SubmitReply:
        raise AssertionError

    def Events(self, request: pb.EventsRequest, context: object) -> AsyncIterator[pb.EventBatch]:
        raise AssertionError


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Servicer, grpc.aio.Channel]]:
    servicer = Servicer()
    server = grpc.aio.server(interceptors=[AioErrorInterceptor()])
    rpc.add_EngineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    try:
        yield servicer, channel
    finally:
        await channel.close()
        await server.stop(0)


def test_an_answer_and_a_refusal() -> None:
    async def run() -> None:
        async with served() as (_, channel):
            assert (await answer_of(rpc.EngineStub(channel).Stats(pb.EngineStatsRequest()))).steps == 7
            with pytest.raises(NotFound, match="nobody has it"):
                await answer_of(rpc.EngineStub(channel).Abort(pb.AbortRequest()))

    asyncio.run(run())


async def _close(channel: grpc.aio.Channel, task: asyncio.Task[object]) -> None:
    await channel.close()


async def _cancel(channel: grpc.aio.Channel, task: asyncio.Task[object]) -> None:
    task.cancel()


@pytest.mark.parametrize(
    ("what", "raised"),
    [(_close, Unavailable), (_cancel, asyncio.CancelledError)],
    ids=["closed", "cancelled"],
)
def test_a_closed_channel_is_no_cancellation(
    what: Callable[[grpc.aio.Channel, asyncio.Task[object]], Awaitable[None]], raised: type[BaseException]
) -> None:
    async def run() -> None:
        async with served() as (servicer, channel):

            async def ask() -> object:
                return await answer_of(rpc.EngineStub(channel).Describe(pb.DescribeRequest()))

            task = asyncio.create_task(ask())
            async with asyncio.timeout(60):
                await servicer.asked.wait()
                await what(channel, task)
                with pytest.raises(raised):
                    await task

    asyncio.run(run())
