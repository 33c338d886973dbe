"""What is kept of GPU tests: the last result of every test that is still there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from tests.gpu.results import ROOT, Results, counts, keep

STEP, SELECT = "tests/gpu/test_step_gpu.py", "tests/gpu/test_select_gpu.py"


def row(test: str, outcome: str = "passed", commit: str = "new") -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "commit": commit, "date": "today"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three results, one of them of a test that is no more."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "gpu", dict)
    path = tmp_path / "gpu_tests.json"
    old = [
        row(f"{STEP}::a", "failed", "old"),
        row(f"{STEP}::b", commit="old"),
        row(f"{SELECT}::c", commit="old"),
    ]
    path.write_text(json.dumps({"tests": old}))
    return path


def names(path: Path) -> list[str]:
    return [test["test"] for test in json.loads(path.read_text())["tests"]]


def test_a_test_that_is_no_longer_found_goes_with_its_result(kept: Path) -> None:
    keep([row(f"{STEP}::b")], {f"{STEP}::b", f"{STEP}::d"})
    assert names(kept) == [f"{SELECT}::c", f"{STEP}::b"], "of a file that nobody looked through, all stay"
    told = json.loads(kept.read_text())
    assert (told["passed"], told["failed"]) == (2, 0)
    assert told["by_commit"] == {
        "old": {"passed": 1, "failed": 0, "skipped": 0},
        "new": {"passed": 1, "failed": 0, "skipped": 0},
    }


def test_so_does_one_whose_file_is_gone(kept: Path) -> None:
    keep([row("tests/gpu/test_of_yesterday_gpu.py::e")], set())
    assert names(kept) == [f"{SELECT}::c", f"{STEP}::a", f"{STEP}::b"]


def test_where_single_tests_are_named_no_other_is_missed() -> None:
    class Config:
        args = (f"{STEP}::a",)

    class Item:
        nodeid = f"{STEP}::a"

    results, config, items = Results(), Config(), [Item()]
    results.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]  # as much as it looks at
    assert results.found == set()
    Config.args = ("tests/gpu",)
    results.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]  # likewise
    assert results.found == {f"{STEP}::a"}


def test_the_kept_file_counts_what_it_lists() -> None:
    told = json.loads((ROOT / "benchmarks/results/gpu_tests.json").read_text())
    assert told.items() >= counts(told["tests"]).items()
    assert all((ROOT / test["test"].split("::")[0]).is_file() for test in told["tests"])
