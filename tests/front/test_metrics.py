"""/metrics: what it counts, how it is written, and that docs/metrics.md lists it all."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.front.live import ROOT, LiveFront, live_front, orders
from tests.kvstore.process import KvStore


class Told(NamedTuple):
    kind: str
    labels: frozenset[str]
    help: str


def _exposed(text: str) -> dict[str, Told]:
    found = {}
    for family in parse_text(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        found[name] = Told(family.type, labels, family.documentation)
    return found


def _documented(section: str) -> dict[str, Told]:
    text = (ROOT / "docs/metrics.md").read_text()
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| `.*$", body, re.MULTILINE)
    ]
    names = [row[0].strip("`") for row in rows]
    assert len(names) == len(set(names)), "a metric is listed twice"
    told = {}
    for name, row in zip(names, rows, strict=True):
        labels = frozenset(label.strip() for label in row[2].split(",")) - {""}
        told[name] = Told(row[1], labels, row[4])
    return told


def _compare(section: str, text: str) -> None:
    exposed, documented = _exposed(text), _documented(section)
    assert sorted(exposed) == sorted(documented)
    for name, told in exposed.items():
        assert (told.kind, told.help) == (documented[name].kind, documented[name].help), name
        if any(line.startswith((f"{name}{{", f"{name}_count{{")) for line in text.splitlines()):
            assert told.labels == documented[name].labels, name


def _samples(front: LiveFront) -> Mapping[str, float]:
    text = httpx.get(f"{front.url}/metrics").text
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_the_decoders_metrics_are_listed(front: LiveFront) -> None:
    assert front.chat(max_tokens=3).status_code == 200
    _compare("decoder", httpx.get(f"{front.url}/metrics").text)


def test_an_engine_whose_answers_depend_on_what_is_resident_says_so(
    front: LiveFront, default_model: Path
) -> None:
    assert _samples(front)['hotset_hits_first{engine="0"}'] == 0
    with live_front(default_model, "--hits-first") as inexact:
        assert _samples(inexact)['hotset_hits_first{engine="0"}'] == 1
        told = inexact.complete(max_tokens=1).json()["system_fingerprint"]
        assert told.startswith("hits_first_")


def test_records_that_are_rounded_change_the_fingerprint(front: LiveFront, default_model: Path) -> None:
    prints = [front.complete(max_tokens=1).json()["system_fingerprint"]]
    for flag in ("--record-dtype=float8", "--index-dtype=float8"):
        with live_front(default_model, flag) as other:
            prints.append(other.complete(max_tokens=1).json()["system_fingerprint"])
    assert len(set(prints)) == 3


def test_the_stores_metrics_are_listed(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hotset-test-") as memory,
        KvStore(Path(memory) / "arena", logs=tmp_path).ready() as store,
    ):
        _compare("kvstore", httpx.get(f"http://{store.metrics_address}/metrics").text)


def test_the_exposition_is_well_formed(front: LiveFront) -> None:
    """What `promtool check metrics` looks at, and OpenMetrics' own stricter parser."""
    for family in parse_text(httpx.get(f"{front.url}/metrics").text):
        assert family.name.startswith("hotset_")
        assert re.fullmatch(r"[a-z_]+", family.name)
        assert family.documentation
        assert not family.documentation.endswith(" ")
        assert not re.search(r"_(ms|milliseconds|us|ns|kb|mb|percent)(_|$)", family.name), "base units only"
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            if family.type == "gauge":
                assert not sample.name.endswith(("_total", "_count", "_bucket"))
    response = httpx.get(
        f"{front.url}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    families = parse_openmetrics(response.text)  # type: ignore[no-untyped-call]  # untyped in prometheus-client
    assert list(families)


def test_requests_are_counted_and_timed(front: LiveFront) -> None:
    before = _samples(front)
    began = time.monotonic()
    assert (
        front.chat(n=2, max_tokens=4, cache_salt=orders(say="a b c d e f g", pause=0.05)).status_code == 200
    )
    assert front.chat(cache_salt=orders(say="x")).status_code == 200
    took = time.monotonic() - began
    assert front.complete(prompt=[5] * 5000).status_code == 400
    assert front.complete(cache_salt=orders(refuse="NoRoom")).status_code == 429
    httpx.get(f"{front.url}/nowhere/{'x' * 50}")
    httpx.request("BREW", f"{front.url}/version")
    after = _samples(front)

    def grew(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert grew('hotset_requests_total{endpoint="chat",outcome="length"}') == 2
    assert grew('hotset_requests_total{endpoint="chat",outcome="stop"}') == 1
    assert grew('hotset_requests_total{endpoint="completions",outcome="refused"}') == 1
    assert grew('hotset_time_to_first_token_seconds_count{engine="0"}') == 3
    assert grew('hotset_inter_token_seconds_count{engine="0"}') == 2 * 3 + 1
    assert grew('hotset_time_per_output_token_seconds_count{engine="0"}') == 3
    assert grew('hotset_request_seconds_count{engine="0"}') == 3
    whole = grew('hotset_request_seconds_sum{engine="0"}')
    first = grew('hotset_time_to_first_token_seconds_sum{engine="0"}')
    between = grew('hotset_inter_token_seconds_sum{engine="0"}')
    each = grew('hotset_time_per_output_token_seconds_sum{engine="0"}')
    assert 2 * 0.2 < whole < 2 * took, "two choices at once, then one; the client's clock ran all the while"
    assert 2 * 0.2 < first + between < whole + 0.001, "a late first token leaves less between it and the last"
    assert between / 3 <= each < between
    assert grew('hotset_generation_tokens_total{engine="0"}') == 4 + 4 + 2
    route = 'path="/v1/chat/completions"'
    assert grew(f'hotset_http_requests_total{{method="POST",{route},status="200"}}') == 2
    assert grew('hotset_http_requests_total{method="POST",path="/v1/completions",status="429"}') == 1
    assert grew('hotset_http_requests_total{method="GET",path="other",status="404"}') == 1
    assert grew('hotset_http_requests_total{method="other",path="/version",status="405"}') == 1


def test_engine_figures_are_told_in_base_units(front: LiveFront) -> None:
    samples = _samples(front)
    for layer in (0, 1):
        where = f'{{engine="0",layer="{layer}"}}'
        hits, misses = (samples[f"hotset_hot_buffer_{what}_total{where}"] for what in ("hits", "misses"))
        assert hits + misses == samples[f"hotset_hot_buffer_chosen_total{where}"] == 100
        assert samples[f"hotset_hot_buffer_fetched_bytes_total{where}"] == 4096
        assert samples[f"hotset_resolve_seconds_total{where}"] == 1.5
    assert samples['hotset_step_seconds_total{engine="0"}'] == 2.0
    assert samples['hotset_steps_planned_total{engine="0",planned="ahead"}'] == 4
    assert samples['hotset_hot_buffer_sampled_blocks_total{engine="0"}'] == 40
    assert samples['hotset_hot_buffer_sampled_misses_total{engine="0",size="0.5x"}'] == 20
    assert samples['hotset_hot_buffer_sampled_misses_total{engine="0",size="2x"}'] == 5
    assert samples['hotset_device_pages{engine="0",state="used"}'] == 3
    assert samples['hotset_device_pages{engine="0",state="free"}'] == 7


def test_without_an_engine_nothing_of_it_is_pretended(default_model: Path) -> None:
    with live_front(default_model, start={"delay": 3600}, wait=False) as front:
        front.until_listening()
        samples = _samples(front)
        assert samples['hotset_engine_ready{engine="0"}'] == 0
        assert 'hotset_requests_running{engine="0"}' not in samples
        assert front.stop() == 0
