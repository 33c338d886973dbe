"""A pytest plugin that keeps what the GPU tests said: benchmarks/results/gpu_tests.json.

`make test-gpu` loads it, because machines with a GPU are rare and their results are worth keeping.
"""

from __future__ import annotations

import pytest

from benchmarks import report


class Results:
    """Outcome, seconds and printed lines of every test that ran."""

    def __init__(self) -> None:
        self.tests: list[dict[str, object]] = []

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
        if not self.tests:
            return
        counts = {
            outcome: sum(test["outcome"] == outcome for test in self.tests)
            for outcome in ("passed", "failed", "skipped")
        }
        report.write("gpu_tests", {**report.gpu(), **counts, "tests": self.tests})


def pytest_configure(config: pytest.Config) -> None:
    """Take part."""
    config.pluginmanager.register(Results(), "hotset-gpu-results")
