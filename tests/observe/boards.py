"""The dashboards' JSON and the rules' YAML as tests read them: every expression with where it stands.

Knows the files as Grafana and Prometheus load them, not what generates them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))

METRIC = re.compile(r"\b(?:[a-z]+:)?hotset_[a-z0-9_]+(?::[a-z0-9_]+)?")


class Expression(NamedTuple):
    where: str  # dashboard / panel / reference of the query, or file / rule
    expr: str
    legend: str = ""

    @property
    def metrics(self) -> set[str]:
        """Without what stands in quotes: a metric's name may be part of a label's value."""
        return set(METRIC.findall(re.sub(r'"[^"]*"', '""', self.expr)))


def panels(dashboard: Path) -> list[dict[str, Any]]:
    """Without the headings."""
    return [panel for panel in json.loads(dashboard.read_text())["panels"] if panel["type"] != "row"]


def variables(dashboard: Path) -> Iterator[dict[str, Any]]:
    yield from json.loads(dashboard.read_text())["templating"]["list"]


def dashboard_expressions(values: Mapping[str, str] | None = None) -> list[Expression]:
    """Of every panel; with `values`, these stand for the dashboard's variables."""
    return [
        Expression(
            f"{path.stem} / {panel['title']} / {target['refId']}",
            _filled(target["expr"], values or {}),
            target["legendFormat"],
        )
        for path in DASHBOARDS
        for panel in panels(path)
        for target in panel["targets"]
    ]


def _filled(expr: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        expr = expr.replace(f"${name}", value)
    return expr


def rules() -> list[tuple[str, dict[str, Any]]]:
    """Every rule, with the name of its file."""
    return [
        (path.stem, rule)
        for path in RULES
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]


def rule_expressions() -> list[Expression]:
    return [
        Expression(f"{file} / {rule.get('record') or rule['alert']}", rule["expr"]) for file, rule in rules()
    ]


def recorded() -> set[str]:
    return {rule["record"] for _, rule in rules() if "record" in rule}
