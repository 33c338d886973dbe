"""docs/quality.md shows what was measured, and the settings' defaults are what follows from it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from benchmarks.quality import table
from benchmarks.report import RESULTS
from services.decoder.settings import DecoderSettings

RESULT: dict[str, Any] = json.loads((RESULTS / "quality.json").read_text())


def test_the_document_shows_the_result() -> None:
    assert table.DOCUMENT.read_text() == table.spliced(table.DOCUMENT.read_text(), RESULT)


def test_the_table_has_every_budget_and_sharing() -> None:
    seen = {
        (entry["quest_sharing"], entry["budget_tokens"])
        for entry in RESULT["variants"]
        if not entry["dense_layers"]
    }
    wanted = {(sharing, budget) for sharing in ("kv_head", "layer") for budget in (256, 512, 1024, 2048)}
    assert seen == wanted | {("kv_head", 0)}
    assert RESULT["tokens_per_context"] * len(RESULT["variants"][0]["loss"]) >= 1000


def test_the_defaults_follow() -> None:
    best = table.chosen(RESULT)
    fields = DecoderSettings.model_fields
    assert fields["budget_tokens"].default == best["budget_tokens"]
    assert fields["quest_sharing"].default == best["quest_sharing"]
    assert fields["dense_layers"].default == 0


def entry(budget: int, sharing: str, excess: float, found: int, dense_layers: int = 0) -> dict[str, Any]:
    return {
        "budget_tokens": budget,
        "quest_sharing": sharing,
        "dense_layers": dense_layers,
        "excess": excess,
        "found": {"2048": found},
    }


DENSE = entry(0, "kv_head", 0.0, 10)


@pytest.mark.parametrize(
    ("others", "best"),
    [
        ([entry(256, "layer", 0.02, 10), entry(512, "layer", 0.009, 10)], 512),
        ([entry(256, "layer", 0.001, 9), entry(512, "layer", 0.009, 10)], 512),
        ([entry(256, "layer", 0.0, 10, dense_layers=2), entry(1024, "layer", 0.0, 11)], 1024),
        ([entry(1024, "layer", 0.0, 10), entry(512, "layer", -0.5, 12)], 512),
    ],
)
def test_the_smallest_good_budget_is_chosen(others: list[dict[str, Any]], best: int) -> None:
    assert table.chosen({"variants": [DENSE, *others]})["budget_tokens"] == best


def test_of_two_sharings_the_better_is_chosen() -> None:
    two = [entry(512, "kv_head", 0.002, 10), entry(512, "layer", 0.001, 10)]
    assert table.chosen({"variants": [DENSE, *two]})["quest_sharing"] == "layer"
    two[0]["found"]["2048"] = 11
    assert table.chosen({"variants": [DENSE, *two]})["quest_sharing"] == "kv_head"


def test_where_no_budget_is_good_the_closest_is_chosen_and_the_document_says_so() -> None:
    bad = [entry(512, "layer", 0.02, 8), entry(2048, "kv_head", 0.02, 9), entry(2048, "layer", 0.03, 9)]
    result = {"variants": [DENSE, *bad, entry(1024, "kv_head", 0.0, 12, dense_layers=2)], "float32_check": []}
    assert not table.good(result)
    assert table.chosen(result) is bad[1]
    assert "no budget measured" in table.conclusion(result)
    result["variants"].append(entry(4096, "layer", 0.0, 10))
    assert table.good(result) == [result["variants"][-1]]
    assert "no budget measured" not in table.conclusion(result)


def test_another_result_would_be_noticed() -> None:
    other = copy.deepcopy(RESULT)
    other["variants"][1]["found"]["2048"] += 1
    text = table.DOCUMENT.read_text()
    assert table.spliced(text, other) != text
