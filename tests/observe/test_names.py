"""Names agree: what rules, dashboards and documents speak of is what docs/metrics.md lists, label by label.

That the list is what both services tell is tests/front/test_metrics.py's affair, by live scrapes.
"""

from __future__ import annotations

import re

import pytest
import yaml

from tests.observe.boards import (
    DASHBOARDS,
    METRIC,
    ROOT,
    Expression,
    dashboard_expressions,
    recorded,
    rule_expressions,
    rules,
    variables,
)
from tests.observe.documented import OF_THE_SCRAPE, documented

EXPRESSIONS = [*dashboard_expressions(), *rule_expressions()]
OF_THE_FRONT = {"hotset_requests_total", "hotset_http_requests_total"}
"""Metrics of the decoder that no engine need have a part in: a refused request, a route that is not there."""


def test_something_is_compared() -> None:
    assert len(documented()) > 70
    assert len(DASHBOARDS) == 3
    assert len(EXPRESSIONS) > 70


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=[expression.where for expression in EXPRESSIONS])
def test_metrics_and_labels_of_an_expression_exist(expression: Expression) -> None:
    known = documented()
    labels = set(OF_THE_SCRAPE)
    for name in expression.metrics:
        assert name in known or name in recorded(), f"{name} is in no scrape"
        labels |= known[name].labels if name in known else {"engine", "size"}
    for name, inside in re.findall(r"(hotset_\w+)\{([^}]*)\}", expression.expr):
        for label in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', inside):
            assert label in known[name].labels | OF_THE_SCRAPE, f"{name} has no label {label}"
    used = re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression.expr)
    named = {label.strip() for group in used for label in group.split(",")} - {""}
    assert named <= labels, named - labels
    grouped: list[str] = re.findall(r"\bby \(([^)]*)\)", expression.expr)
    shown = set(re.findall(r"\{\{(\w+)\}\}", expression.legend))
    kept = {label.strip() for group in grouped for label in group.split(",")} if grouped else labels
    assert shown <= kept, f"the legend names {shown - kept}, which the query drops"


def test_variables_ask_for_metrics_that_exist() -> None:
    known = documented()
    for path in DASHBOARDS:
        for variable in variables(path):
            for name in METRIC.findall(variable["query"]):
                assert name in known, name


def test_every_variable_that_is_used_is_there_and_the_other_way_round() -> None:
    for path in DASHBOARDS:
        text = "".join(one.expr for one in dashboard_expressions() if one.where.startswith(f"{path.stem} /"))
        used = set(re.findall(r"\$(\w+)", text.replace('"0$1"', ""))) - {"__rate_interval"}
        assert used | {"datasource"} == {variable["name"] for variable in variables(path)}, path.stem


def test_every_metric_of_an_engine_says_which() -> None:
    silent = {
        name
        for name, told in documented().items()
        if told.section == "decoder" and "engine" not in told.labels
    }
    assert silent == OF_THE_FRONT


def test_recorded_names_say_what_they_keep() -> None:
    """`engine:` keeps the engine; `instance:` is one process's."""
    for _, rule in rules():
        if name := rule.get("record"):
            level, metric, _ = name.split(":")
            assert metric.startswith("hotset_")
            assert (level == "engine") == ("hotset_store_" not in rule["expr"]), name


def test_documents_name_metrics_that_exist() -> None:
    known = {re.sub(r"_(bucket|sum|count)$", "", name) for name in documented()} | set(documented())
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`((?:[a-z]+:)?hotset_[a-z0-9_]+(?::[a-z0-9_]+)?)", path.read_text()):
            assert name in known or name in recorded(), f"{path.name}: {name}"
    queries = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert len(queries) > 5
    for query in queries:
        assert Expression("", query).metrics <= set(known), query


def test_the_autoscaler_asks_for_metrics_that_exist() -> None:
    """Kubernetes' adapter reads series by name, and the autoscaler what the adapter makes of them."""
    adapter = (ROOT / "deploy/k8s/prometheus-adapter-values.yaml").read_text()
    read = re.findall(r"seriesQuery: (hotset_\w+)", adapter)
    assert read
    assert set(read) <= set(documented())
    scaler = yaml.safe_load((ROOT / "deploy/k8s/base/autoscaler.yaml").read_text())
    asked = {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]}
    assert asked == set(re.findall(r"as: (hotset_\w+)", adapter))
