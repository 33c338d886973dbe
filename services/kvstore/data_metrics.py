"""Prometheus figures of the data plane, beside metrics.py's. docs/metrics.md lists them.

Knows figures, not transports. They are numbers that their threads count up; a scrape reads them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvstore.data_plane import DataFigures


class DataMetrics(Collector):
    """Register it with the store's registry."""

    def __init__(self, figures: Callable[[], DataFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """The figures now, as metric families."""
        now = self._figures()
        roles = (("served", now.served), ("asked", now.asked))
        moved = CounterMetricFamily(
            "hotset_store_data_bytes",
            "Bytes moved between stores, frames included.",
            labels=["role", "direction"],
        )
        requests = CounterMetricFamily(
            "hotset_store_data_requests", "Requests for bytes between stores.", labels=["role"]
        )
        errors = CounterMetricFamily(
            "hotset_store_data_errors", "Requests that failed, by what was wrong.", labels=["role", "kind"]
        )
        for role, counters in roles:
            moved.add_metric([role, "sent"], counters.sent_bytes)
            moved.add_metric([role, "received"], counters.received_bytes)
            requests.add_metric([role], counters.requests)
            for fault, count in counters.faults.items():
                errors.add_metric([role, fault.value], count)
        yield moved
        yield requests
        yield errors
        for name, text, value in (
            ("pages_served", "Pages read by other stores.", now.served_pages),
            ("pieces_read", "Pieces of pages read by decoders that do not map the arena.", now.read_pieces),
            ("pieces_written", "Pieces of pages written by them.", now.written_pieces),
            ("pages_pulled", "Pages that arrived from other stores.", now.pulls.pages),
            ("pulls_failed", "Pulls that ended before all was here.", now.pulls.failures),
            ("pulls_empty", "Other stores asked that had nothing.", now.pulls.empty),
        ):
            yield CounterMetricFamily(f"hotset_store_{name}", text, value=value)
        yield GaugeMetricFamily(
            "hotset_store_data_held_bytes", "Memory of answers under way.", now.held_bytes
        )
        yield GaugeMetricFamily("hotset_store_peers", "Other stores that a match may ask.", now.peers)
        yield GaugeMetricFamily(
            "hotset_store_registered",
            "1 while this store stands in etcd and watches the others there.",
            now.registered,
        )
        lanes = GaugeMetricFamily(
            "hotset_store_data_lanes",
            "1 for each lane that carries bytes, may/... where it only may; lane is none while nobody is "
            "connected.",
            labels=["transport", "lane"],
        )
        for lane in now.lanes or ("none",):
            lanes.add_metric([now.transport, lane], 1)
        yield lanes
