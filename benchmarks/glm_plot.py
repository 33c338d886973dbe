"""The picture of glm_slice.json: tokens a second by rows, a panel a model and context.

    python -m benchmarks.glm_plot

Knows rows of figures and matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import report

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "glm_slice.png"
_SHOWN = {
    "no_io": ("0.4", ":"),
    "sync": ("tab:blue", "s-"),
    "prefetch": ("tab:green", "^-"),
    "hits_first": ("tab:orange", "v-"),
    "full": ("tab:red", "o-"),  # the last, or the others would hide it
}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture, of exact records alone."""
    exact = [row for row in rows if row.get("record_dtype", "auto") == "auto"]
    panels = sorted({(row["model"], row["context"]) for row in exact})
    figure = Figure(figsize=(4.6 * len(panels), 3.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (model, context) in zip(axes, panels, strict=True):
        own = [row for row in exact if (row["model"], row["context"]) == (model, context)]
        _panel(axis, own, f"{model}, {context:,} tokens a row")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _panel(axis: Axes, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    for mode, (color, style) in _SHOWN.items():
        own = sorted(
            (row["concurrency"], row["tok_s"])
            for row in rows
            if row["mode"] == mode and row["capacity"] in ("all", "elastic")
        )
        if own:
            size = 7 if mode == "full" else 4
            axis.plot(*zip(*own, strict=True), style, color=color, markersize=size, label=mode)
    if limit := max((row["concurrency"] for row in rows if row["mode"] == "full"), default=0):
        axis.axvline(limit, color="tab:red", linewidth=0.8, linestyle="--", label=f"full's limit, {limit}")
    axis.set_xscale("log", base=2)
    ticks = [2**power for power in range(8) if 2**power <= max(row["concurrency"] for row in rows)]
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rows")
    axis.set_ylabel("tokens/s")
    axis.set_title(title)
    axis.legend(frameon=False)


def main() -> None:
    """Draw what was measured last."""
    draw(json.loads((report.RESULTS / "glm_slice.json").read_text())["rows"], PICTURE)


if __name__ == "__main__":
    main()
