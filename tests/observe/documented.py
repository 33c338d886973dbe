"""The tables of docs/metrics.md: every metric with its type and labels.

Knows the page's form only; tests/front/test_metrics.py compares it with live scrapes of both services.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tests.observe.boards import ROOT

OF_THE_SCRAPE = {"job", "instance"}


class Documented(NamedTuple):
    section: str  # decoder or kvstore
    kind: str
    labels: frozenset[str]


def documented() -> Mapping[str, Documented]:
    """By name, as a scrape shows it; a histogram under the names of its three kinds of series."""
    found: dict[str, Documented] = {}
    section = ""
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        if not (match := re.match(r"\| `(hotset_\w+)` \| (\w+) \|([^|]*)\|", line)):
            continue
        name, kind = match[1], match[2]
        labels = frozenset(label.strip() for label in match[3].split(",")) - {""}
        if kind == "histogram":
            found[f"{name}_sum"] = found[f"{name}_count"] = Documented(section, kind, labels)
            found[f"{name}_bucket"] = Documented(section, kind, labels | {"le"})
        else:
            found[name] = Documented(section, kind, labels)
    return found
