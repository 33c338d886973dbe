"""The process: ports, signals, the housekeeping beat, and an end in good order.

Wires the parts together and knows none of their rules.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from contextlib import suppress

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from hotset.v1 import kvstore_pb2_grpc

from services.contract.channel import SERVER_OPTIONS
from services.contract.errors import SetupError
from services.contract.rpc_errors import AioErrorInterceptor
from services.contract.wire_security import TokenCheck, WireSecurity
from services.kvstore.data_metrics import DataMetrics
from services.kvstore.data_plane import DataPlane
from services.kvstore.event_publisher import EventPublisher
from services.kvstore.held_parts import HeldParts
from services.kvstore.idle_check import IdleCheck
from services.kvstore.metrics import MetricsServer, RpcMeter, StoreMetrics
from services.kvstore.news_metrics import NewsMetrics
from services.kvstore.page_news import NO_NEWS, KvEvents, NewsFigures, PageNews
from services.kvstore.servicer import KvStoreServicer
from services.kvstore.settings import KvStoreSettings
from services.kvstore.store import Store

_log = logging.getLogger(__name__)

SERVICE_NAME = "hotset.v1.KvStore"
_BEAT_SECONDS = 0.2  # how long a dead client's pages may stay unnoticed
_LAST_CALLS_SECONDS = 1.0  # calls in progress get this long once the server stops


async def serve(settings: KvStoreSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain and leave; a second signal skips the draining.

    Raises:
        SetupError: the arena or a port cannot be had, or someone took files away from under the store.
    """
    if not settings.kv_events:
        return await _serve(settings, NO_NEWS, NewsFigures())
    publisher = EventPublisher(settings.kv_events, settings.kv_events_replay, settings.kv_events_topic)
    try:
        events = KvEvents(publisher.send)
        await _serve(settings, events, events.figures, publisher.addresses)
    finally:
        publisher.close()


async def _serve(
    settings: KvStoreSettings, news: PageNews, told: NewsFigures, told_at: tuple[str, ...] = ()
) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: hurry.set() if stop.is_set() else stop.set())

    security = WireSecurity.read(settings.wire_dir)
    store = Store.open(settings.arena_dir, settings.arena_bytes, time.monotonic, settings.lease_seconds, news)
    keep = store.reopened  # a start that fails leaves an arena that it found, and none that it made
    data: DataPlane | None = None
    try:
        sizes = store.sizes()
        metrics = StoreMetrics(store.snapshot())
        data = plane = DataPlane(settings, store.parts, security)
        metrics.registry.register(DataMetrics(lambda: plane.figures))
        metrics.registry.register(NewsMetrics(told))
        server = grpc.aio.server(
            interceptors=[AioErrorInterceptor(), RpcMeter(metrics), TokenCheck(security)],
            options=SERVER_OPTIONS,
        )
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(
            KvStoreServicer(
                store,
                plane,
                HeldParts(time.monotonic, settings.lease_seconds),
                wants_tokens=bool(told_at),
            ),
            server,
        )
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        address = _listen(server, settings.listen, security)
        metrics_server = MetricsServer(metrics.registry, settings.metrics_host, settings.metrics_port)
        try:
            await server.start()
            await _set_health(health_servicer, health_pb2.HealthCheckResponse.SERVING)
            plane.join(settings, address)
            keep = True  # from here on a fault leaves what a kill would leave
            gc.freeze()  # a step's call need not wait for a collection among what stays until the end
            _announce(
                sizes.table() + "".join(f"\nkv events {address}" for address in told_at),
                f"kvstore ready grpc={address} metrics={metrics_server.address} arena={sizes.arena_path}",
            )
            idle = IdleCheck(store, metrics.count_breach)
            beat = asyncio.create_task(_beat(store, metrics, idle))
            try:
                await _first(stop, beat)
                await _set_health(health_servicer, health_pb2.HealthCheckResponse.NOT_SERVING)
                await _drain(store, hurry, settings.drain_seconds)
                keep = settings.keep_arena
            finally:
                beat.cancel()
                await server.stop(0 if hurry.is_set() else _LAST_CALLS_SECONDS)
                if not hurry.is_set():
                    idle.check()
        finally:
            metrics_server.close()
    finally:
        if data is not None:
            await data.close()
        store.close(keep=keep)
    _log.info("stopped arena=%s", "kept" if keep else "removed")


def _listen(server: grpc.aio.Server, listen: str, security: WireSecurity) -> str:
    """Bind; the address with the port that was bound."""
    try:
        port = security.listen(server, listen)
    except RuntimeError as error:
        raise SetupError(f"cannot listen on {listen}; is it in use? choose another --listen") from error
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


def _announce(table: str, ready: str) -> None:
    """Tell a person, and whoever started us, what was made; nothing else goes to standard output."""
    sys.stdout.write(f"{table}\n{ready}\n")
    sys.stdout.flush()


async def _set_health(servicer: health.aio.HealthServicer, status: int) -> None:
    for name in ("", SERVICE_NAME):
        await servicer.set(name, status)


async def _beat(store: Store, metrics: StoreMetrics, idle: IdleCheck) -> None:
    while True:
        store.tick()
        now = store.snapshot()
        metrics.publish(now)
        idle.beat(now)
        await asyncio.sleep(_BEAT_SECONDS)


async def _first(stop: asyncio.Event, beat: asyncio.Task[None]) -> None:
    """Wait for `stop`; a beat that fails ends the service instead of leaving it half alive."""
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({stopping, beat}, return_when=asyncio.FIRST_COMPLETED)
    if beat in done:
        stopping.cancel()
        await beat


async def _drain(store: Store, hurry: asyncio.Event, seconds: float) -> None:
    """Take nothing new; wait for the clients to detach, `seconds` at most."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while store.drain() and loop.time() < deadline and not hurry.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(loop.time() + 0.05, deadline)):
                await hurry.wait()
