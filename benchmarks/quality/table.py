"""The quality table, and the default that follows from it.

Knows the result file only; docs/quality.md holds what `markdown` makes of it, between two marks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "quality.md"
BEGIN, END = "<!-- written by benchmarks.quality -->\n", "<!-- end -->\n"
MOST_EXCESS = 0.01  # perplexity over dense's, as a share

Entry = Mapping[str, Any]


def perplexity(entry: Entry, context: str | None = None) -> float:
    """Of one context, or of all decoded tokens (every context has equally many)."""
    losses = entry["loss"]
    return math.exp(losses[context] if context else sum(losses.values()) / len(losses))


def good(result: Mapping[str, Any]) -> list[Entry]:
    """The entries that cost under 1% of perplexity and find as much as dense does.

    Exempt layers are left out: they stay resident, which is what a hot buffer is there to avoid.
    """
    dense = result["variants"][0]
    return [
        entry
        for entry in _candidates(result)
        if entry["excess"] < math.log1p(MOST_EXCESS) and _found(entry) >= _found(dense)
    ]


def chosen(result: Mapping[str, Any]) -> Entry:
    """The smallest good budget; where none is good, what finds most. Then more found, then less excess."""
    enough = good(result)
    if enough:
        return min(enough, key=lambda entry: (entry["budget_tokens"], -_found(entry), entry["excess"]))
    return min(_candidates(result), key=lambda entry: (-_found(entry), entry["excess"]))


def markdown(result: Mapping[str, Any]) -> str:
    """The table and a sentence on its result."""
    dense = result["variants"][0]
    contexts, lengths = list(dense["loss"]), list(dense["found"])
    asked = result["questions_per_length"]
    head = [
        "decode attends to",
        *(f"ppl after {int(context):,}" for context in contexts),
        "ppl, all",
        "over dense, %",
        *(f"found in {int(length):,}" for length in lengths),
        f"found of {asked * len(lengths)}",
    ]
    rows = [
        [
            _title(entry),
            *(f"{perplexity(entry, context):.3f}" for context in contexts),
            f"{perplexity(entry):.3f}",
            "" if entry is dense else f"{percent(entry):+.2f} ± {100 * entry['excess_error']:.2f}",
            *(f"{entry['found'][length]}" for length in lengths),
            f"{_found(entry)}",
        ]
        for entry in result["variants"]
    ]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    tokens = result["tokens_per_context"]
    text = (
        f"{result['dtype']}; perplexity (ppl) over {tokens:,} decoded tokens a context, {asked} needles a "
        "length; ± is one standard error of the mean over segments and contexts."
    )
    return f"{table}\n\n{text}\n"


def conclusion(result: Mapping[str, Any]) -> str:
    """Which default follows, and one point in both dtypes."""
    best = chosen(result)
    parts = [
        f"Default: `budget_tokens = {best['budget_tokens']}`, `quest_sharing = {best['quest_sharing']}`: "
        + (
            "the smallest budget that keeps perplexity within 1 % of dense and finds what dense finds."
            if good(result)
            else "**no budget measured keeps perplexity within 1 % of dense and finds what dense finds**; "
            "this one comes closest."
        )
    ]
    for check in result["float32_check"]:
        if check["budget_tokens"]:
            (same,) = [entry for entry in result["variants"] if entry["name"] == check["name"]]
            (context,) = check["loss"]
            dense = result["variants"][0]["loss"][context]
            parts.append(
                f"The same point in two dtypes: after {int(context):,} tokens, {_title(same)} costs "
                f"{100 * math.expm1(same['loss'][context] - dense):+.2f} % in {result['dtype']} and "
                f"{percent(check):+.2f} % in float32."
            )
    return "\n".join(parts) + "\n"


def spliced(text: str, result: Mapping[str, Any]) -> str:
    """The document's text with this result between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}{markdown(result)}\n{conclusion(result)}{END}{rest.split(END)[1]}"


def write(result: Mapping[str, Any]) -> None:
    """Put it into docs/quality.md."""
    DOCUMENT.write_text(spliced(DOCUMENT.read_text(), result))


def _candidates(result: Mapping[str, Any]) -> list[Entry]:
    return [entry for entry in result["variants"][1:] if not entry["dense_layers"]]


def _found(entry: Entry) -> int:
    return sum(entry["found"].values())


def percent(entry: Entry) -> float:
    """Perplexity over dense's, per cent."""
    return 100 * math.expm1(entry["excess"])


def _title(entry: Entry) -> str:
    if not entry["budget_tokens"]:
        return "everything (dense)"
    exempt = f", first {entry['dense_layers']} layers dense" if entry["dense_layers"] else ""
    return f"Quest {entry['budget_tokens']:,}, {entry['quest_sharing']}{exempt}"
