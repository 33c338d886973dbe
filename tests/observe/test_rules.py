"""Prometheus' configuration, rules and alerts, by Prometheus' own promtool."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.observe.boards import ROOT, rules

CASES = sorted(Path(__file__).parent.glob("*_rules.yml"))
DEPLOYED = ROOT / "deploy/prometheus"


def test_the_configuration_is_valid(promtool: Callable[..., str]) -> None:
    told = promtool("check", "config", "--syntax-only", DEPLOYED / "prometheus.yml")
    assert "SUCCESS" in promtool("check", "config", DEPLOYED / "prometheus.yml"), told


@pytest.mark.parametrize("cases", CASES, ids=[path.stem for path in CASES])
def test_rules_do_what_they_say(promtool: Callable[..., str], cases: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", cases)


def test_every_alert_is_seen_to_come_and_not_to_come() -> None:
    fired: set[str] = set()
    silent: set[str] = set()
    for path in CASES:
        for case in yaml.safe_load(path.read_text())["tests"]:
            for check in case.get("alert_rule_test", ()):
                (fired if check["exp_alerts"] else silent).add(check["alertname"])
    alerts = {rule["alert"] for _, rule in rules() if "alert" in rule}
    assert fired == alerts
    assert alerts - silent <= {"HotsetEngineRestartsOften"}  # it is silent beside the one that restarted once


def test_a_rule_that_is_broken_is_noticed(
    prometheus_programs: object, promtool: Callable[..., str], tmp_path: Path
) -> None:
    """The cases can fail: with another threshold they do."""
    shutil.copytree(DEPLOYED, tmp_path / "deploy/prometheus")
    (tmp_path / "tests/observe").mkdir(parents=True)
    shutil.copy(CASES[1], tmp_path / "tests/observe")
    alerts = tmp_path / "deploy/prometheus/rules/alerts.yml"
    text = alerts.read_text()
    assert "pages_held:ratio > 0.9" in text
    alerts.write_text(text.replace("pages_held:ratio > 0.9", "pages_held:ratio > 0.96"))
    with pytest.raises(AssertionError, match="HotsetArenaNearlyFull"):
        promtool("test", "rules", tmp_path / "tests/observe" / CASES[1].name)


def test_every_alert_tells_what_to_do() -> None:
    for _, rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
            assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
            assert "$labels" in rule["annotations"]["summary"] or "$value" in rule["annotations"]["summary"]


def test_every_alert_is_documented_with_its_severity() -> None:
    page = (ROOT / "docs/dashboards.md").read_text()
    rows = re.findall(r"^\| (`Hotset[^|]+) \| [^|]+ \| (\w+) \|$", page, re.MULTILINE)
    told = {name: severity for names, severity in rows for name in re.findall(r"`(\w+)`", names)}
    assert told == {rule["alert"]: rule["labels"]["severity"] for _, rule in rules() if "alert" in rule}


def test_what_is_scraped_are_the_services_of_compose() -> None:
    settings = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
    targets = {
        target
        for job in settings["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    }
    assert targets == {"decoder:8000", "kvstore:7701"}
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {target.split(":")[0] for target in targets} <= set(services)
