"""The dashboards' files: what the generator writes, complete, and in PromQL that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from deploy.grafana.__main__ import DIRECTORY, files
from tests.observe.boards import DASHBOARDS, ROOT, dashboard_expressions, panels

EXAMPLE = {"instance": ".+", "engine": ".+", "__rate_interval": "20s", "link_roof": "48000000000"}


def test_the_files_are_what_the_generator_writes() -> None:
    assert {path.name: path.read_text() for path in DIRECTORY.iterdir()} == files(), "run `make dashboards`"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=[path.stem for path in DASHBOARDS])
def test_every_panel_says_what_it_shows(dashboard: Path) -> None:
    found = panels(dashboard)
    titles = [panel["title"] for panel in found]
    assert len(set(titles)) == len(titles)
    for panel in found:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]


def test_panels_do_not_overlap() -> None:
    for dashboard in DASHBOARDS:
        taken: dict[tuple[int, int], str] = {}
        for panel in panels(dashboard):
            at = panel["gridPos"]
            for x in range(at["x"], at["x"] + at["w"]):
                for y in range(at["y"], at["y"] + at["h"]):
                    assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_prometheus_reads_every_expression(promtool: Callable[..., str], tmp_path: Path) -> None:
    expressions = dashboard_expressions(EXAMPLE)
    assert not [one for one in expressions if "$" in one.expr.replace('"0$1"', "")]
    rules = [{"record": f"panel:{at}", "expr": one.expr} for at, one in enumerate(expressions)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", file)
    rules[0]["expr"] += ")"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    with pytest.raises(AssertionError, match="could not parse"):
        promtool("check", "rules", file)


def test_grafana_finds_dashboards_and_source() -> None:
    provisioning = ROOT / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    scrapes = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scrapes["scrape_interval"]
    [provider] = yaml.safe_load((provisioning / "dashboards/hotset.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
