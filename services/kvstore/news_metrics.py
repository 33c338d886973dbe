"""Prometheus figures of KV events, beside metrics.py's. docs/metrics.md lists them.

Knows figures, not events. The event loop counts them up; a scrape reads them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvstore.page_news import NewsFigures


class NewsMetrics(Collector):
    """Register it with the store's registry."""

    def __init__(self, figures: NewsFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """The figures now, as one family."""
        events = CounterMetricFamily(
            "hotset_store_kv_events", "Pages and clearings told to subscribers of KV events.", labels=["kind"]
        )
        for kind in ("stored", "removed", "cleared"):
            events.add_metric([kind], getattr(self._figures, kind))
        yield events
