"""`python -m deploy.grafana.render`: draw every panel of every dashboard from a Prometheus, for docs/images.

Knows the dashboards' JSON and Prometheus' HTTP API; needs matplotlib (the dev extra). It stands in for
Grafana's drawing, not for its queries: expressions, legends, units and places are those of the files.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

DASHBOARDS = Path(__file__).resolve().parent / "dashboards"

_COLUMN, _ROW = 0.60, 0.36  # inches of a step of Grafana's grid
_DOTS = 80  # an inch
_LETTER = 5.6  # dots
_COLOURS = 96  # of the palette; keeps a picture below 150 KB


class Line(NamedTuple):
    """A series as its legend names it."""

    name: str
    when: list[float]  # Unix seconds
    value: list[float]


class Source:
    """A time span of a Prometheus."""

    def __init__(
        self, url: str, span: tuple[float, float], variables: Mapping[str, str], names: Mapping[str, str]
    ) -> None:
        """From and to Unix seconds; `names` stand for values of labels in legends."""
        self._url, self._variables, self._names = url.rstrip("/"), variables, names
        start, end = span
        self.start, self.end = start, end
        self.step = max(1.0, (end - start) / 240)

    def lines(self, target: Mapping[str, Any]) -> list[Line]:
        """What one query of a panel shows, in the order of Prometheus' answer."""
        expr = target["expr"]
        for name, value in self._variables.items():
            expr = expr.replace(f"${name}", value)
        asked = {"query": expr, "start": self.start, "end": self.end, "step": self.step}
        address = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            found = json.load(answer)["data"]["result"]
        return [self._line(target["legendFormat"], one) for one in found]

    def _line(self, legend: str, found: Mapping[str, Any]) -> Line:
        labels = {label: self._names.get(value, value) for label, value in found["metric"].items()}
        name = re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)
        points = found["values"]
        return Line(name, [float(when) for when, _ in points], [float(value) for _, value in points])


def draw(dashboard: Path, source: Source) -> Image.Image:
    """All panels of one dashboard, where Grafana puts them."""
    board = json.loads(dashboard.read_text())
    width = 24
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) + 2
    figure = Figure(figsize=(width * _COLUMN, height * _ROW), dpi=_DOTS, facecolor="white")
    figure.text(0.01, 1 - 0.9 / height, board["title"], fontsize=14, fontweight="bold", va="center")
    for panel in board["panels"]:
        at = panel["gridPos"]
        top = 1 - (at["y"] + 2) / height
        if panel["type"] == "row":
            figure.text(0.01, top - 0.6 / height, panel["title"], fontsize=12, color="#555555", va="center")
            continue
        box = (
            (at["x"] + 1.5) / width,
            top - (at["h"] - 2.6) / height,
            (at["w"] - 2.1) / width,
            (at["h"] - 3.9) / height,
        )
        _panel(figure.add_axes(box), panel, source)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    return Image.open(drawn).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)


def _panel(axes: Axes, panel: Mapping[str, Any], source: Source) -> None:
    lines = [line for target in panel["targets"] for line in source.lines(target)]
    axes.set_title(panel["title"])
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.set_xlim(source.start, source.end)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 3, 6]))
    axes.xaxis.set_major_formatter(FuncFormatter(_clock))
    if panel["type"] == "heatmap":
        _heat(axes, lines, unit)
        return
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    if custom.get("stacking", {}).get("mode") == "normal":
        _stacked(axes, lines)
    else:
        for line in lines:
            axes.plot(*_broken(line, 3 * source.step), linewidth=1.4, label=line.name)
    if custom.get("scaleDistribution", {}).get("type") == "log":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0, top=defaults.get("max"))
        axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: readable(value, unit)))
    if lines:
        _legend(axes, lines)
    else:
        axes.text(0.5, 0.5, "nothing to show here", transform=axes.transAxes, ha="center", color="#888888")


def _legend(axes: Axes, lines: list[Line]) -> None:
    """Below the panel; those that are not 0 first, and no more than fit."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda place: not any(lines[place].value))
    letters = axes.bbox.width / _LETTER
    columns = max(1, min(3, len(labels), int(letters / (max(map(len, labels)) + 7))))
    shown = order[: max(5, 3 * columns)]
    names = [labels[place] for place in shown]
    if len(order) > len(shown):
        names[-1] += f" and {len(order) - len(shown)} more"
    axes.legend(
        [handles[place] for place in shown],
        names,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=columns,
        columnspacing=1.2,
    )


def _broken(line: Line, longest: float) -> tuple[list[float], list[float]]:
    """Its points, with a gap where Prometheus had none for `longest` seconds."""
    when, value = line.when[:1], line.value[:1]
    for before, moment, number in zip(line.when, line.when[1:], line.value[1:], strict=False):
        if moment - before > longest:
            when.append(before)
            value.append(np.nan)
        when.append(moment)
        value.append(number)
    return when, value


def _stacked(axes: Axes, lines: list[Line]) -> None:
    when = sorted({moment for line in lines for moment in line.when})
    values = [dict(zip(line.when, line.value, strict=True)) for line in lines]
    heights = [[value.get(moment, 0.0) for moment in when] for value in values]
    if when:
        axes.stackplot(when, heights, labels=[line.name for line in lines], alpha=0.7)


def _heat(axes: Axes, lines: list[Line], unit: str) -> None:
    when = sorted({moment for line in lines for moment in line.when})
    lines = sorted(lines, key=lambda line: line.name)
    cells = np.full((len(lines), len(when)), np.nan)
    for row, line in enumerate(lines):
        known = dict(zip(line.when, line.value, strict=True))
        cells[row] = [known.get(moment, np.nan) for moment in when]
    mesh = axes.pcolormesh(when, np.arange(len(lines)), cells, cmap="viridis", shading="nearest")
    axes.grid(visible=False)
    axes.set_ylabel("layer", fontsize=8)
    assert axes.figure is not None
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.01)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: readable(value, unit)))


def _clock(moment: float, _: object) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%H:%M:%S")


def readable(value: float, unit: str) -> str:
    """As Grafana would write it, roughly."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return "0 s"
    after = {"decbytes": "B", "Bps": "B/s", "ops": "/s"}.get(unit, "")
    power = 0
    while abs(value) >= 1000 and power < 4:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {('', 'k', 'M', 'G', 'T')[power]}{after}".strip()


def _style() -> AbstractContextManager[None]:
    return mpl.rc_context(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "legend.fontsize": 8,
            "legend.labelspacing": 0.25,
            "legend.frameon": False,
        }
    )


def main() -> None:
    """Draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its URL")
    parser.add_argument("--minutes", type=float, default=10.0, help="how far back")
    parser.add_argument("--until", type=float, default=0.0, help="the right edge, Unix seconds; 0 = now")
    parser.add_argument("--rename", action="append", default=[], help="LABEL_VALUE=NAME, for legends")
    parser.add_argument("--rate-window", default="20s", help="what stands for $__rate_interval")
    parser.add_argument("--link-roof", default="48000000000", help="bytes a second; see the dashboard")
    parser.add_argument("--into", type=Path, default=Path("docs/images"), help="directory of the pictures")
    given = parser.parse_args()
    variables = {"instance": ".+", "engine": ".+"}
    variables |= {"__rate_interval": given.rate_window, "link_roof": given.link_roof}
    end = given.until or time.time()
    names = dict(pair.split("=", 1) for pair in given.rename)
    source = Source(given.prometheus, (end - 60 * given.minutes, end), variables, names)
    given.into.mkdir(parents=True, exist_ok=True)
    for dashboard in sorted(DASHBOARDS.glob("*.json")):
        picture = given.into / f"{dashboard.stem}.png"
        with _style():
            draw(dashboard, source).save(picture, optimize=True)
        print(f"{picture} {picture.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
