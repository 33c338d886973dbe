"""A pytest plugin that keeps what the GPU tests said: benchmarks/results/gpu_tests.json.

`make test-gpu` loads it, because machines with a GPU are rare and their results are worth keeping. A test
that did not run keeps its last result, with the date and commit of that run; one that is gone does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report

ROOT = Path(__file__).parents[2]
_OUTCOMES = ("passed", "failed", "skipped")


class Results:
    """Outcome, seconds and printed lines of every test that ran."""

    def __init__(self) -> None:
        self.tests: list[dict[str, Any]] = []
        self.found: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Before -k and -m leave any out; not where single tests are named, for then others go unseen."""
        if not any("::" in argument for argument in config.args):
            self.found = {item.nodeid for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self.tests.append(
                {
                    "test": report.nodeid,
                    "outcome": report.outcome,
                    "seconds": round(report.duration, 2),
                    "printed": [line for line in report.capstdout.splitlines() if "=" in line],
                }
            )

    def pytest_sessionfinish(self) -> None:
        if self.tests:
            ran = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": report.commit()}
            keep([{**test, **ran} for test in self.tests], self.found)


def keep(tests: Iterable[Mapping[str, Any]], found: Set[str]) -> None:
    """Put the results of some tests in the place of their earlier ones.

    Args:
        tests: what ran.
        found: the tests that are there, of every file that was looked through; of others nothing is dropped,
            unless the file is gone.
    """
    path = report.RESULTS / "gpu_tests.json"
    known = json.loads(path.read_text())["tests"] if path.is_file() else []
    merged = {test["test"]: test for test in [*known, *tests]}
    rows = [merged[name] for name in sorted(merged) if not _is_gone(name, found)]
    report.write("gpu_tests", {**report.gpu(), **counts(rows), "tests": rows})


def counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Tests by outcome: all of them, and of each commit that any was run at last."""
    by_commit: dict[str, dict[str, int]] = {}
    for row in rows:
        of_commit = by_commit.setdefault(row["commit"], dict.fromkeys(_OUTCOMES, 0))
        of_commit[row["outcome"]] += 1
    every = {name: sum(of_commit[name] for of_commit in by_commit.values()) for name in _OUTCOMES}
    return {**every, "by_commit": by_commit}


def _is_gone(test: str, found: Set[str]) -> bool:
    file = test.split("::")[0]
    looked_through = any(name.startswith(file + "::") for name in found)
    return (looked_through and test not in found) or not (ROOT / file).is_file()


def pytest_configure(config: pytest.Config) -> None:
    """Take part."""
    config.pluginmanager.register(Results(), "hotset-gpu-results")
