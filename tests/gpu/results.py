"""A pytest plugin that keeps what the GPU tests said: benchmarks/results/gpu_tests.json.

`make test-gpu` loads it, because machines with a GPU are rare and their results are worth keeping. A test
that did not run keeps its last result, with the date and commit of that run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from benchmarks import report


class Results:
    """Outcome, seconds and printed lines of every test that ran."""

    def __init__(self) -> None:
        self.tests: list[dict[str, Any]] = []

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
            keep([{**test, **ran} for test in self.tests])


def keep(tests: Iterable[Mapping[str, Any]]) -> None:
    """Put the results of some tests in the place of their earlier ones."""
    path = report.RESULTS / "gpu_tests.json"
    known = json.loads(path.read_text())["tests"] if path.is_file() else []
    merged = {test["test"]: test for test in [*known, *tests]}
    rows = [merged[name] for name in sorted(merged)]
    counts = {
        outcome: sum(test["outcome"] == outcome for test in rows)
        for outcome in ("passed", "failed", "skipped")
    }
    report.write("gpu_tests", {**report.gpu(), **counts, "tests": rows})


def pytest_configure(config: pytest.Config) -> None:
    """Take part."""
    config.pluginmanager.register(Results(), "hotset-gpu-results")
