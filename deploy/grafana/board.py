"""A dashboard as data: sections of panels, each with its queries, unit and meaning.

Knows PromQL only as text, and nothing of Grafana's JSON: grafana_json.py makes that of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WINDOW = "$__rate_interval"
"""Grafana's: four scrapes at least, more where a pixel is longer."""

ENGINE = 'instance=~"$instance", engine=~"$engine"'
EACH = "instance, engine"
"""Engines are numbered behind each decoder, so a number alone is no engine."""
INSTANCE = 'instance=~"$instance"'

Unit = Literal["s", "short", "percentunit", "decbytes", "Bps", "ops"]
"""Of Grafana: seconds, a count, a share of 1, bytes, bytes a second, times a second."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel; `legend` names its series, labels in double braces."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time; as `heat`, each series is a row of a heat map instead of a line."""

    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    heat: bool = False
    stacked: bool = False
    log: bool = False  # the axis
    width: int = 8  # of 24
    top: float | None = None  # of the axis


@dataclass(frozen=True, slots=True)
class Section:
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the dashboard's top: of a label's values, or, with `text`, what somebody types."""

    name: str
    label: str
    description: str
    query: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; `uid` is its address and the name of its file."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    sections: tuple[Section, ...]


DECODER_INSTANCE = Variable(
    "instance", "Decoder", "Which decoders, by address.", "label_values(hotset_engine_ready, instance)"
)
ENGINES = Variable(
    "engine",
    "Engine",
    "Which engines of these decoders: one a device.",
    'label_values(hotset_engine_ready{instance=~"$instance"}, engine)',
)


def rate(metric: str, labels: str) -> str:
    """A counter's increase a second."""
    return f"rate({metric}{{{labels}}}[{WINDOW}])"


def ratio(above: str, below: str, labels: str, by: str = "") -> str:
    """One counter's rate over another's, both summed; no value while the lower one rests."""
    over = f" by ({by})" if by else ""
    return f"sum{over} ({rate(above, labels)}) / (sum{over} ({rate(below, labels)}) > 0)"


def quantiles(histogram: str, labels: str) -> tuple[Query, ...]:
    """Median, 95th and 99th percentile over all series."""
    buckets = f"sum by (le) ({rate(f'{histogram}_bucket', labels)})"
    return tuple(
        Query(f"histogram_quantile({share}, {buckets})", name)
        for share, name in (("0.5", "median"), ("0.95", "95 %"), ("0.99", "99 %"))
    )
