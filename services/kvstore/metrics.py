"""Prometheus figures of the store, on a port of their own. docs/metrics.md lists them.

Knows snapshots, not the store: the event loop publishes one a few times a second, and the scrape, which
runs in a thread of the metrics server, reads the latest, which nobody changes any more.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.contract.errors import HotsetError, SetupError
from services.contract.layout import LAYOUT_VERSION
from services.kvstore.orders import ClientKind
from services.kvstore.sessions import SessionEnd
from services.kvstore.snapshot import StoreSnapshot

_RPC_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class StoreMetrics(Collector):
    """The figures of one store, in a registry of their own."""

    def __init__(self, first: StoreSnapshot) -> None:
        self._latest = first
        self._version = _version()
        self.registry = CollectorRegistry()
        self.rpc_seconds = Histogram(
            "hotset_store_rpc_seconds",
            "Time a call spent in the store's process.",
            ["method"],
            buckets=_RPC_BUCKETS,
            registry=self.registry,
        )
        self.rpc_errors = Counter(
            "hotset_store_rpc_errors",
            "Calls that ended with a status other than OK.",
            ["method", "status"],
            registry=self.registry,
        )
        self._breaches = 0
        self.registry.register(self)

    def count_breach(self) -> None:
        """The books were found to contradict themselves."""
        self._breaches += 1

    def publish(self, snapshot: StoreSnapshot) -> None:
        """Let scrapes see `snapshot` from now on."""
        self._latest = snapshot

    def collect(self) -> Iterable[Metric]:
        """The latest snapshot as metric families."""
        now = self._latest
        yield InfoMetricFamily(
            "hotset_store",
            "What runs.",
            {"version": self._version, "layout_version": str(LAYOUT_VERSION), "arena": now.arena_path},
        )
        gauges: tuple[tuple[str, str, float], ...] = (
            ("arena_bytes", "Length of the arena file.", now.arena_bytes),
            ("arena_resident_bytes", "Bytes of the arena that lie in memory.", now.resident_bytes),
            ("page_bytes", "Bytes of a page; 0 before the first attach.", now.page_bytes),
            ("page_tokens", "Tokens of a page; 0 before the first attach.", now.page_tokens),
            ("sessions_expired", "Mapped clients past their lease that live.", now.expired_sessions),
            (
                "sessions_unclaimed",
                "Mapped clients of before a restart that live and have not attached again.",
                now.unclaimed_sessions,
            ),
            ("recovering", "1 while pages of before a restart wait for clients.", float(now.recovering)),
            ("draining", "1 while the store takes no new sessions and pages.", float(now.draining)),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"hotset_store_{name}", text, value)

        pages = GaugeMetricFamily("hotset_store_pages", "Host pages by state.", labels=["state"])
        for state in ("free", "open", "sealed", "cached"):
            pages.add_metric([state], getattr(now.pages, state))
        yield pages
        sessions = GaugeMetricFamily("hotset_store_sessions", "Attached clients.", labels=["kind"])
        for kind, count in now.sessions.items():
            sessions.add_metric([kind.value], count)
        yield sessions

        happened = now.counters
        for name, text, value in (
            (
                "integrity_violations",
                "Times that the books of pages were found to contradict themselves.",
                self._breaches,
            ),
            ("attaches", "Sessions opened or taken up again.", happened.attaches),
            ("pages_allocated", "Pages given to clients.", happened.allocated),
            ("pages_released", "Pages that became free, the ends of sessions included.", now.freed_pages),
            ("pages_evicted", "Cached pages that became free to make room.", now.evicted_pages),
            ("pages_looked_up", "Pages whose hashes decoders' matches named.", happened.looked_up),
            ("pages_matched", "Pages that these matches found.", happened.matched),
            ("pages_sealed", "Pages made immutable.", happened.sealed),
            ("pages_refused", "Pages that were wanted and not free.", happened.refused),
        ):
            yield CounterMetricFamily(f"hotset_store_{name}", text, value=value)
        ended = CounterMetricFamily("hotset_store_sessions_ended", "Sessions ended.", labels=["reason"])
        for reason, count in happened.ended.items():
            ended.add_metric([reason.value], count)
        yield ended
        leases = CounterMetricFamily(
            "hotset_store_lease_expirations", "Leases of decoders that ended unrenewed.", labels=["kind"]
        )
        leases.add_metric([ClientKind.REMOTE.value], happened.ended[SessionEnd.LEASE])
        leases.add_metric([ClientKind.MAPPED.value], happened.mapped_leases)
        yield leases


class MetricsServer:
    """Serves a registry at /metrics until `close`."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Listen.

        Raises:
            SetupError: the address cannot be had.
        """
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise SetupError(
                f"cannot serve metrics at {host}:{port}: {error.strerror or error}; "
                "choose another --metrics-port (0 = any)"
            ) from error
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class RpcMeter(grpc.aio.ServerInterceptor):
    """Times every unary call and counts its failures; stands inside the error interceptor, to see errors."""

    def __init__(self, metrics: StoreMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The method's handler, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        unary: Callable[[Any, Any], Awaitable[Any]] = handler.unary_unary
        method = handler_call_details.method.rpartition("/")[2]

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            start = time.perf_counter()
            try:
                return await unary(request, context)
            except Exception as error:
                status = error.status if isinstance(error, HotsetError) else grpc.StatusCode.INTERNAL
                self._metrics.rpc_errors.labels(method, status.name).inc()
                raise
            finally:
                self._metrics.rpc_seconds.labels(method).observe(time.perf_counter() - start)

        return grpc.unary_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )


def _version() -> str:
    try:
        return version("hotset")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
