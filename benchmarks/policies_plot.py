"""The picture of benchmarks/policies.py: the synthetic stream beside the paper, and real traces by layer.

Knows rows of figures and matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.policies import Row

_SHOWN = {"lru": "tab:blue", "lrfu 8": "tab:orange", "lrfu 16": "tab:red", "belady": "tab:green"}


def draw(rows: Sequence[Row], paper: Mapping[tuple[str, int], float], path: Path) -> None:
    """Write the picture; a panel for which there are no rows is left out."""
    made_up = [row for row in rows if row.trace == "synthetic"]
    real = [row for row in rows if row.trace != "synthetic"]
    panels = bool(made_up) + 2 * bool(real)
    if not panels:
        return
    figure = Figure(figsize=(5.2 * panels, 4.0), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if made_up:
        _beside_paper(axes.pop(0), made_up, paper)
    if real:
        _by_context(axes.pop(0), real)
        _by_layer(axes.pop(0), real)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _beside_paper(axis: Axes, rows: Sequence[Row], paper: Mapping[tuple[str, int], float]) -> None:
    """Bars of ours, by policy and capacity, where the paper has a figure; the paper's own as marks."""
    found = {(row.policy, row.capacity): row.miss_percent for row in rows}
    keys = [key for key in paper if key in found]
    axis.bar(range(len(keys)), [found[key] for key in keys], color="tab:blue", label="synthetic stream")
    theirs = [paper[key] for key in keys]
    axis.plot(range(len(keys)), theirs, "D", color="black", label="paper (GLM-5.1)")
    axis.set_xticks(range(len(keys)), [f"{policy}\n{capacity:,}" for policy, capacity in keys])
    axis.set_ylabel("misses, % of choices")
    axis.set_title("k = 2,048 of 100,384 tokens")
    axis.legend(frameon=False)


def _by_context(axis: Axes, rows: Sequence[Row]) -> None:
    """All layers together, at the smallest capacity: a group of bars a sequence."""
    least = min(row.capacity for row in rows)
    own = [row for row in rows if row.layer is None and row.capacity == least]
    places = sorted({(row.trace, row.context) for row in own}, key=lambda place: (place[1], place[0]))
    width = 0.8 / len(_SHOWN)
    for number, (policy, color) in enumerate(_SHOWN.items()):
        found = {(row.trace, row.context): row.miss_percent for row in own if row.policy == policy}
        at = [place + (number - (len(_SHOWN) - 1) / 2) * width for place in range(len(places))]
        axis.bar(at, [found.get(place, 0.0) for place in places], width, color=color, label=policy)
    axis.set_xticks(range(len(places)), [f"{trace}\n{context:,}" for trace, context in places])
    axis.set_xlabel("trace, tokens of context")
    axis.set_title(f"real text, all layers, capacity {least:,}")
    axis.legend(frameon=False)


def _by_layer(axis: Axes, rows: Sequence[Row]) -> None:
    """One line a policy: the longest context of the first trace at the smallest capacity."""
    first = [row for row in rows if row.trace == rows[0].trace]
    least, longest = min(row.capacity for row in first), max(row.context for row in first)
    for policy, color in _SHOWN.items():
        own = {
            row.layer: row.miss_percent
            for row in first
            if row.policy == policy and row.capacity == least and row.context == longest
        }
        layers = sorted(layer for layer in own if layer is not None)
        axis.plot(layers, [own[layer] for layer in layers], ".-", color=color, label=policy)
    axis.set_xlabel("layer")
    axis.set_ylim(bottom=0)
    axis.set_title(f"by layer, {longest:,} tokens, capacity {least:,}")
