"""The plan for people, and as JSON. Knows lines; counts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.command.plan.cost import MISS_RATE, Cost
from services.command.plan.fit import Fit
from services.contract.byte_size import format_bytes


@dataclass(frozen=True, slots=True)
class ModePlan:
    """Everything that is told of one mode."""

    asked: Fit
    rows_that_fit: int  # of the asked length
    longest_context: int  # of the asked rows, tokens
    cost: Cost | None  # of the asked rows, or of those that fit; None = not one

    def as_json(self) -> dict[str, Any]:
        """The same, flat enough for jq."""
        told = asdict(self.asked) | {"fits": self.asked.fits}
        told |= {"rows_that_fit": self.rows_that_fit, "longest_context": self.longest_context}
        cost = self.cost
        told["step"] = None
        if cost is not None:
            derived = {
                "tpot_ms": cost.tpot_ms,
                "link_share": cost.link_share,
                "tokens_per_s": cost.tokens_per_s,
            }
            told["step"] = asdict(cost) | derived
        return told


def table(title: str, plans: Sequence[ModePlan]) -> str:
    """The plan, a column a mode."""
    lines = [title, "", _line("", [plan.asked.mode for plan in plans])]
    for name in plans[0].asked.parts:
        sizes = [plan.asked.parts[name] for plan in plans]
        if any(sizes):
            lines.append(_line(name, [_size(size) for size in sizes]))
    lines += [
        _line("needed on the GPU", [_size(plan.asked.device_bytes) for plan in plans]),
        _line("of what it may use", [_size(plan.asked.usable_bytes) for plan in plans]),
        _line("needed on the host", [_size(plan.asked.host_bytes) for plan in plans]),
        _line("of what it may use", [_size(plan.asked.host_limit) for plan in plans]),
        _line("fits", ["yes" if plan.asked.fits else "NO" for plan in plans]),
        _line("rows of that length that fit", [f"{plan.rows_that_fit:,}" for plan in plans]),
        _line("longest context of that many", [f"{plan.longest_context:,}" for plan in plans]),
        "",
    ]
    costs = [plan.cost for plan in plans]
    if any(costs):
        lines += [_line(name, values) for name, values in _cost_lines(plans)]
    lines += [advice(plan) for plan in plans if not plan.asked.fits]
    return "\n".join(lines)


def _cost_lines(plans: Sequence[ModePlan]) -> list[tuple[str, list[str]]]:
    costs = [plan.cost for plan in plans]

    def each(text: Mapping[int, str]) -> list[str]:
        return [text.get(number, "-") for number in range(len(costs))]

    known = {number: cost for number, cost in enumerate(costs) if cost is not None}
    return [
        (
            "a step of",
            each({n: f"{cost.rows:,} row{'s' if cost.rows > 1 else ''}" for n, cost in known.items()}),
        ),
        ("a row's tokens on the GPU", each({n: f"{cost.row_tokens:,}" for n, cost in known.items()})),
        ("read on the GPU", each({n: f"{cost.read_bytes / 1e9:.1f} GB" for n, cost in known.items()})),
        ("misses", each({n: f"{cost.miss_rate:.1%}" for n, cost in known.items()})),
        ("missed bytes a token", each({n: _size(cost.miss_bytes_per_token) for n, cost in known.items()})),
        (
            "link",
            each({n: f"{cost.link_gb_s:.0f} GB/s" for n, cost in known.items() if cost.mode == "tiered"}),
        ),
        ("time per output token", each({n: f"{cost.tpot_ms:.1f} ms" for n, cost in known.items()})),
        ("of it the link", each({n: f"{cost.link_share:.0%}" for n, cost in known.items()})),
        ("tokens a second", each({n: f"{cost.tokens_per_s:,.0f}" for n, cost in known.items()})),
    ]


def advice(plan: ModePlan) -> str:
    """What would fit, where what was asked does not."""
    fit = plan.asked
    lacks, more = [], []
    if fit.device_bytes > fit.usable_bytes:
        lacks.append(f"{_size(fit.device_bytes - fit.usable_bytes)} of GPU memory")
        more.append(f"--gpu-memory {_round_up(fit.card_bytes)}")
    if fit.host_bytes > fit.host_limit:
        lacks.append(f"{_size(fit.host_bytes - fit.host_limit)} of host memory")
        more.append(f"--host-memory {_round_up(fit.host_bytes)}")
    ways = [f"--rows {plan.rows_that_fit}"] if plan.rows_that_fit else []
    ways += [f"--context {plan.longest_context}"] if plan.longest_context else []
    ways.append(" and ".join(more))
    return f"\n{fit.mode} lacks {' and '.join(lacks)}. It would fit with {', or '.join(ways)}."


def assumptions(cost: Cost | None, budget_tokens: int, miss_rate: float | None) -> str:
    """Where the times come from, and where they are too good."""
    said = "" if miss_rate is not None else f", {MISS_RATE:.0%} misses at twice the budget"
    lines = [f"\nTimes rest on docs/speed.md (one H200{said}); measure yours with `hotset bench`."]
    if miss_rate is None and cost is not None and cost.miss_rate and cost.row_tokens < 2 * budget_tokens:
        lines.append("Here a row has fewer hot slots than that, so more of its choices will miss.")
    return "\n".join(lines)


def _round_up(size: int) -> str:
    return f"{-(-size // 2**30)}GiB"


def _line(name: str, values: Sequence[str]) -> str:
    return f"{name:<30}" + "".join(f"{value:>14}" for value in values)


def _size(size: float) -> str:
    return format_bytes(round(size)) if size else "-"
