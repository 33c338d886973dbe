"""Prometheus over live services under load: every panel has data, and the figures are true."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.front.real import tiny_model
from tests.observe.boards import dashboard_expressions
from tests.observe.programs import Programs
from tests.observe.prometheus import eventually
from tests.observe.stack import Stack, running_stack, under_load

VALUES = {"instance": ".+", "engine": ".+", "__rate_interval": "8s", "link_roof": "48000000000"}

ON_A_GPU_ONLY = {
    "hotset-serving / Time a step / B",  # steps as a GPU timed them
    "hotset-serving / Share of time that a GPU waits between steps / A",
}
"""Queries that have no data here, and why."""

AT_REST = {
    "hotset-serving / Running and waiting / C",  # nobody is parked: the arena has room
    "hotset-serving / Interruptions / A",
    "hotset-serving / Interruptions / B",
    "hotset-serving / Interruptions / C",  # no engine ends
    "hotset-serving / Restarts and violations / A",
    "hotset-serving / Restarts and violations / B",
    "hotset-store / Pages that change hands / D",  # the arena has room, so nothing is evicted or refused
    "hotset-store / Pages that change hands / E",
    "hotset-store / Health / A",  # the store was not restarted, does not end, and its books are right
    "hotset-store / Health / B",
    "hotset-store / Health / C",
    "hotset-store / Sessions / B",  # the one client renews its lease
    "hotset-store / Sessions / C",
    "hotset-store / Leases and attaches / A",
    "hotset-store / Leases and attaches / B",  # it attached before the first scrape
    "hotset-store / Leases and attaches / C",
    "hotset-store / Bytes / A",  # there is one store: nothing moves between stores
    "hotset-store / Errors / A",
    "hotset-store / Pages / A",
    "hotset-store / Pages / B",
    "hotset-store / Pages / C",
    "hotset-store / Pages / D",
    "hotset-store / Requests / A",
    "hotset-store / Memory of answers under way / A",
    "hotset-hot-buffer / Rows with everything resident / A",  # prompts are longer than what a row can own
    "hotset-hot-buffer / Evictions and resizes / B",  # only while rows come and go
}
"""Queries that have data, which may all be 0 in this situation."""

pytestmark = pytest.mark.timeout(900)


class Seen:
    """A stack after its load, and when that was."""

    def __init__(self, stack: Stack, model: Path, began: float, ended: float) -> None:
        self.stack, self.model, self.began, self.ended = stack, model, began, ended


@pytest.fixture(scope="module", params=["tiny", pytest.param("bundled", marks=pytest.mark.slow)])
def seen(
    request: pytest.FixtureRequest,
    default_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    prometheus_programs: Programs,
) -> Iterator[Seen]:
    """Load goes on until every panel that can has had data, and there are as many scrapes as tests want."""
    directory = tmp_path_factory.mktemp("stack")
    model = default_model
    if request.param == "tiny":
        model = tiny_model(directory / "model", default_model)
    prompt_tokens, max_tokens = (900, 40) if request.param == "tiny" else (400, 16)
    with running_stack(model, directory, prometheus_programs) as stack:
        began = time.time()
        with under_load(stack, prompt_tokens, max_tokens):
            deadline = began + 600
            while missing := _missing(stack, began, time.time()) + _lacking(stack):
                assert time.time() < deadline, f"no data in 600 s: {missing}"
                time.sleep(1)
            ended = time.time()
        yield Seen(stack, model, began, ended)


def _missing(stack: Stack, began: float, ended: float) -> list[str]:
    """Queries that lack what they should show."""
    missing = []
    for one in dashboard_expressions(VALUES):
        if one.where in ON_A_GPU_ONLY:
            continue
        points = [
            value for found in stack.prometheus.over(one.expr, began, ended) for _, value in found.points
        ]
        known = [value for value in points if not math.isnan(value)]
        if not known or (one.where not in AT_REST and not any(known)):
            missing.append(one.where)
    return missing


def _counted(stack: Stack, name: str) -> dict[tuple[str, float], float]:
    """A counter of the hot buffer in every scrape, by layer and time."""
    found = stack.prometheus.scrapes(f"hotset_hot_buffer_{name}_total")
    return {(one.labels["layer"], when): value for one in found for when, value in one.points}


def _lacking(stack: Stack) -> list[str]:
    """Scrapes in the midst of steps, while there are too few."""
    misses = _counted(stack, "misses")
    return [] if len(misses) > 20 and len(set(misses.values())) > 10 else ["scrapes"]


def test_every_panel_has_data(seen: Seen) -> None:
    assert _missing(seen.stack, seen.began, seen.ended) == []


def test_what_is_excused_is_shown_and_needs_the_excuse(seen: Seen) -> None:
    where = {one.where for one in dashboard_expressions()}
    assert where >= ON_A_GPU_ONLY | AT_REST
    for one in dashboard_expressions(VALUES):
        found = seen.stack.prometheus.over(one.expr, seen.began, seen.ended)
        if one.where in ON_A_GPU_ONLY:
            assert not found, one.where


def test_promtool_accepts_every_metric(seen: Seen, promtool: Callable[..., str]) -> None:
    for url in seen.stack.metrics:
        text = httpx.get(url, timeout=60).text
        assert "hotset_" in text
        promtool("check", "metrics", text=text)
    with pytest.raises(AssertionError, match="_total"):
        promtool("check", "metrics", text="# HELP hotset_x X.\n# TYPE hotset_x counter\nhotset_x 1\n")


def test_both_services_were_scraped_and_every_rule_could_be_evaluated(seen: Seen) -> None:
    prometheus = seen.stack.prometheus
    assert {found.labels["job"] for found in prometheus.now("max_over_time(up[10m]) == 1")} == {
        "hotset-decoder",
        "hotset-kvstore",
    }
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == 20
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    for rule in rules:
        if rule["type"] == "recording":
            assert prometheus.over(rule["name"], seen.began, time.time()), rule["name"]
    violations = [rule for rule in rules if "Integrity" in rule["name"]]
    assert [rule["state"] for rule in violations] == ["inactive", "inactive"]


def test_every_scrape_adds_up(seen: Seen) -> None:
    """hits + misses = chosen, and bytes = misses x block bytes, layer by layer, in the midst of steps too."""
    chosen, hits, misses, fetched = (
        _counted(seen.stack, name) for name in ("chosen", "hits", "misses", "fetched_bytes")
    )
    block_bytes = _block_bytes(seen.model)
    assert not _lacking(seen.stack)
    assert chosen.keys() == hits.keys() == misses.keys() == fetched.keys()
    for at in chosen:
        assert hits[at] + misses[at] == chosen[at], at
        assert fetched[at] == misses[at] * block_bytes, at


def test_exposed_fetch_time_is_resolves_own(seen: Seen) -> None:
    """It grows with every layer's misses, and stays below the time of the steps that it is part of."""
    prometheus = seen.stack.prometheus
    inside = {
        one.labels["layer"]: one.points[-1][1] for one in prometheus.scrapes("hotset_resolve_seconds_total")
    }
    [steps] = prometheus.scrapes("hotset_step_seconds_total")
    assert all(seconds > 0 for seconds in inside.values())
    assert sum(inside.values()) < steps.points[-1][1]


def test_a_change_of_the_hit_rate_shows_in_the_next_scrape(seen: Seen) -> None:
    """After a request has its answer, the first scrape that begins later has all that it did.

    An engine on a machine that stands still may not answer a scrape in time, which then has the figures of
    the one before; so not each of the requests must be on time, but most of them.
    """
    stack = seen.stack
    eventually("the engine rests", lambda: stack.service.metric("hotset_requests_running") == 0)
    before = _next_scrape(stack, time.time())
    on_time = 0
    for turn in range(6):
        stack.ask(60 if turn % 2 else 1000, 30, first=20000 + 1000 * turn)
        after = _next_scrape(stack, time.time())
        told = after["generation_tokens"] - before["generation_tokens"]
        on_time += told == 30 and _hit_rate(after) != _hit_rate(before)
        before = {**after, "generation_tokens": before["generation_tokens"] + 30}
    assert on_time >= 4


def _hit_rate(figures: dict[str, float]) -> float:
    return figures["hot_buffer_hits"] / figures["hot_buffer_chosen"]


def _next_scrape(stack: Stack, after: float) -> dict[str, float]:
    """Some counters, all layers together, in the first scrape that begins later."""

    def found(name: str) -> list[float]:
        series = stack.prometheus.scrapes(f"hotset_{name}_total")
        sums: dict[float, float] = {}
        for when, value in (point for one in series for point in one.points):
            sums[when] = sums.get(when, 0.0) + value
        return [value for when, value in sorted(sums.items()) if when > after]

    names = ("generation_tokens", "hot_buffer_hits", "hot_buffer_chosen")
    eventually("a scrape", lambda: all(found(name) for name in names))
    return {name: found(name)[0] for name in names}


def _block_bytes(model: Path) -> int:
    """Of one KV head: keys and values of 16 tokens, float32."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(16 * 2 * head_dim * 4)
