"""The engine's figures as Prometheus families, from its last Stats reply.

A scrape asks for a fresh reply with a short deadline; it works without one, and without an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

from hotset.v1 import engine_pb2
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from services.contract.errors import HotsetError
from services.decoder.front.errors import EngineNotReady
from services.decoder.front.supervisor import EngineStatus, Supervisor
from services.decoder.front.version import version

STATS_SECONDS = 0.5

_NANOSECOND = 1e-9

_BY_LAYER = (
    (
        "hotset_hot_buffer_chosen",
        "Distinct blocks selected; the open one only if chosen.",
        "chosen_blocks",
        1.0,
    ),
    ("hotset_hot_buffer_hits", "Chosen blocks that were in a hot slot.", "hits", 1.0),
    ("hotset_hot_buffer_misses", "Chosen blocks that were not.", "misses", 1.0),
    ("hotset_hot_buffer_evictions", "Hot slots whose block was replaced.", "evictions", 1.0),
    ("hotset_hot_buffer_fetched_bytes", "Bytes copied from the arena into hot slots.", "fetched_bytes", 1.0),
    ("hotset_resolve_seconds", "Time inside resolve, fetches included.", "resolve_ns", _NANOSECOND),
)
"""Name, help, field of LayerStats, unit's factor."""

_COUNTERS = (
    ("hotset_prompt_tokens", "Prompt tokens prefilled.", "prompt_tokens", 1.0),
    ("hotset_cached_prompt_tokens", "Prompt tokens served by the prefix cache.", "cached_prompt_tokens", 1.0),
    ("hotset_generation_tokens", "Tokens sampled.", "generation_tokens", 1.0),
    (
        "hotset_integrity_violations",
        "Times that a page, slot or row was found lost or owned twice.",
        "integrity_violations",
        1.0,
    ),
    (
        "hotset_rows_parked",
        "Times that a choice had to give up its row; it keeps its host pages.",
        "rows_parked",
        1.0,
    ),
    (
        "hotset_requests_rewound",
        "Times that a parked choice had to give up its host pages: it finds what is left, and replays.",
        "pages_given_up",
        1.0,
    ),
    ("hotset_hot_resizes", "Times a row's hot slots became more or fewer.", "hot_resizes", 1.0),
    ("hotset_steps", "Forward passes.", "steps", 1.0),
    ("hotset_step_seconds", "Time in forward passes.", "step_ns", _NANOSECOND),
    ("hotset_decode_steps", "Steps that only decoded, as a GPU timed them; 0 on a CPU.", "decode_steps", 1.0),
    ("hotset_decode_seconds", "GPU time from those steps' inputs to their logits.", "decode_ns", _NANOSECOND),
    ("hotset_device_busy_seconds", "GPU time in steps.", "device_busy_ns", _NANOSECOND),
    (
        "hotset_device_idle_seconds",
        "GPU time between a step and the next that continues its rows.",
        "device_idle_ns",
        _NANOSECOND,
    ),
)
"""Name, help, field of EngineStats, unit's factor."""

_POOLS = (
    ("hotset_rows", "Seats for running choices.", "rows_used", "rows_total"),
    ("hotset_device_pages", "Pages of the selector's index (and of KV in full mode) on the device.",
     "device_pages_used", "device_pages_total"),
    ("hotset_hot_slots", "Slots of the hot buffer, each layer.", "hot_slots_used", "hot_slots_total"),
)  # fmt: skip
"""Name, help, fields of EngineStats: used and total."""


class EnginesCollector(Collector):
    """Figures of all engines: each family once, with every engine's samples."""

    def __init__(self, collectors: Sequence[EngineCollector]) -> None:
        self._collectors = collectors

    async def refresh(self) -> None:
        """Ask all of them at once."""
        await asyncio.gather(*(one.refresh() for one in self._collectors))

    def collect(self) -> Iterable[Metric]:
        """The families."""
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for family in collector.collect():
                first = families.setdefault(family.name, family)
                if first is not family:
                    first.samples.extend(family.samples)
        return families.values()


class EngineCollector(Collector):
    """Figures of one engine, labelled with its index."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._last: engine_pb2.EngineStats | None = None
        self._life = -1

    async def refresh(self) -> None:
        """Ask the engine for its figures; without an answer in time the last ones of this life stay."""
        if self._life != self._supervisor.restarts:
            self._life, self._last = self._supervisor.restarts, None
        try:
            self._last = await self._supervisor.client.stats(STATS_SECONDS)
        except (EngineNotReady, HotsetError):
            return

    def collect(self) -> Iterable[Metric]:
        """The families, with no samples where the engine has said nothing in this life."""
        engine = str(self._supervisor.index)
        ready = GaugeMetricFamily(
            "hotset_engine_ready", "1 while the engine serves, else 0.", labels=["engine"]
        )
        ready.add_metric([engine], float(self._supervisor.status is EngineStatus.READY))
        yield ready
        restarts = CounterMetricFamily(
            "hotset_engine_restarts", "Lives of the engine after its first.", labels=["engine"]
        )
        restarts.add_metric([engine], self._supervisor.restarts)
        yield restarts
        probe = GaugeMetricFamily(
            "hotset_probe",
            "1 if the engine only probes: no bytes are fetched, answers are wrong.",
            labels=["engine"],
        )
        told = self._supervisor.description
        probe.add_metric([engine], float(told is not None and told.probe_no_io))
        yield probe
        first = GaugeMetricFamily(
            "hotset_hits_first",
            "1 if attention sums up hits first, so that answers may depend on what is resident.",
            labels=["engine"],
        )
        first.add_metric([engine], float(told is not None and told.hits_first))
        yield first
        yield self._info(engine)
        yield self._arena(engine)
        yield self._arena_pages(engine)
        yield from _families(self._last, engine)

    def _info(self, engine: str) -> Metric:
        info = InfoMetricFamily("hotset_engine", "What the engine runs.", labels=["engine"])
        told = self._supervisor.description
        if told is not None:
            facts = {
                "kv_mode": told.kv_mode,
                "dtype": told.dtype,
                "device": told.device,
                "version": version(),
            }
            info.add_metric([engine], facts)
        return info

    def _arena(self, engine: str) -> Metric:
        """From Describe, which answers during the start, when this changes."""
        arena = GaugeMetricFamily(
            "hotset_arena_bytes",
            "The arena: what the engine's GPU reaches by now, and the rest; on a CPU nothing is registered.",
            labels=["engine", "state"],
        )
        told = self._supervisor.told
        if told.arena_bytes:
            arena.add_metric([engine, "registered"], float(told.arena_registered_bytes))
            rest = told.arena_bytes - told.arena_registered_bytes
            arena.add_metric([engine, "unregistered"], float(rest))
        return arena

    def _arena_pages(self, engine: str) -> Metric:
        pages = GaugeMetricFamily(
            "hotset_arena_pages", "Pages that the arena has room for.", labels=["engine"]
        )
        if self._supervisor.told.arena_pages:
            pages.add_metric([engine], float(self._supervisor.told.arena_pages))
        return pages


def _families(stats: engine_pb2.EngineStats | None, engine: str) -> Iterator[Metric]:
    gauges = (
        ("hotset_requests_running", "Choices that have a row.", "requests_running"),
        ("hotset_requests_waiting", "Choices that wait for a row.", "requests_waiting"),
        (
            "hotset_requests_parked",
            "Of those that wait, choices that had a row and keep their host pages.",
            "requests_parked",
        ),
        ("hotset_host_pages_held", "Pages of the arena that the engine holds.", "host_pages_held"),
    )
    yield from _hot_rows(stats, engine)
    yield from _curve(stats, engine)
    yield _planned(stats, engine)
    for name, text, field in gauges:
        gauge = GaugeMetricFamily(name, text, labels=["engine"])
        if stats is not None:
            gauge.add_metric([engine], _value(stats, field))
        yield gauge
    for name, text, used, total in _POOLS:
        pool = GaugeMetricFamily(name, text, labels=["engine", "state"])
        if stats is not None:
            pool.add_metric([engine, "used"], _value(stats, used))
            pool.add_metric([engine, "free"], _value(stats, total) - _value(stats, used))
        yield pool
    for name, text, field, factor in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["engine"])
        if stats is not None:
            counter.add_metric([engine], _value(stats, field) * factor)
        yield counter
    for name, text, field, factor in _BY_LAYER:
        counter = CounterMetricFamily(name, text, labels=["engine", "layer"])
        for layer in () if stats is None else stats.layers:
            counter.add_metric([engine, str(layer.layer)], _value(layer, field) * factor)
        yield counter


def _curve(stats: engine_pb2.EngineStats | None, engine: str) -> Iterator[Metric]:
    blocks = CounterMetricFamily(
        "hotset_hot_buffer_sampled_blocks",
        "Chosen blocks that were looked at for hotset_hot_buffer_sampled_misses_total.",
        labels=["engine"],
    )
    misses = CounterMetricFamily(
        "hotset_hot_buffer_sampled_misses",
        "Of these, blocks that hot buffers so many times as large would have missed.",
        labels=["engine", "size"],
    )
    if stats is not None and stats.curve:
        blocks.add_metric([engine], float(stats.sampled_blocks))
        for point in stats.curve:
            misses.add_metric([engine, f"{point.size:g}x"], float(point.misses))
    yield blocks
    yield misses


def _planned(stats: engine_pb2.EngineStats | None, engine: str) -> Metric:
    steps = CounterMetricFamily(
        "hotset_steps_planned",
        "Forward passes by when they were planned: ahead, while the one before ran, or why only after it.",
        labels=["engine", "planned"],
    )
    if stats is not None:
        for how, count in sorted(stats.steps_planned.items()):
            steps.add_metric([engine, how], float(count))
    return steps


def _hot_rows(stats: engine_pb2.EngineStats | None, engine: str) -> Iterator[Metric]:
    whole = GaugeMetricFamily(
        "hotset_hot_rows_whole", "Rows with a hot slot for every block of theirs.", labels=["engine"]
    )
    tokens = GaugeMetricFamily(
        "hotset_hot_row_tokens",
        "Tokens that a row has hot slots for: of the row with fewest, and of the one with most.",
        labels=["engine", "row"],
    )
    if stats is not None:
        whole.add_metric([engine], _value(stats, "hot_rows_whole"))
        tokens.add_metric([engine, "least"], _value(stats, "hot_row_tokens_least"))
        tokens.add_metric([engine, "most"], _value(stats, "hot_row_tokens_most"))
    yield whole
    yield tokens


def _value(stats: engine_pb2.EngineStats | engine_pb2.LayerStats, field: str) -> float:
    value = getattr(stats, field)
    assert isinstance(value, int)
    return float(value)
