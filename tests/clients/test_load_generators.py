"""What GuideLLM and AIPerf measure is what the server's own histograms say, within a tenth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import client, environment
from tests.clients.process import run
from tests.clients.twin import MODEL
from tests.front.real import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # the first run installs

PROMPT_TOKENS = 256
"""Long enough that prefill is most of the time to the first token: what lies between client and server is not
in the histograms, and took 4 to 75 ms a request where both shared two cores."""
ANSWER_TOKENS = 24
REQUESTS = 20
AGREE = 0.1
FIRST, LATER = "hotset_time_to_first_token_seconds", "hotset_time_per_output_token_seconds"


@dataclass(frozen=True)
class Told:
    """Means, milliseconds."""

    first_ms: float
    later_ms: float


class Histograms:
    """What the server's histograms observe from now on."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        names = [f"{name}_{part}" for name in (FIRST, LATER) for part in ("sum", "count")]
        return {name: self._service.metric(name) for name in names}

    def told(self, requests: int) -> Told:
        """Means over `requests` choices, and no more."""
        grew = {name: now - self._before[name] for name, now in self._read().items()}
        assert grew[f"{FIRST}_count"] == grew[f"{LATER}_count"] == requests
        return Told(*(1e3 * grew[f"{name}_sum"] / requests for name in (FIRST, LATER)))


def guidellm(service: Service, model: Path, streams: int, home: Path) -> dict[str, Any]:
    """Its report on one benchmark, all of whose requests went well."""
    report = home / "report.json"
    flags = {
        "backend": f"kind=openai_http,target={service.url}",
        "profile": f"kind=concurrent,streams={streams}",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={model}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}",
        "seed": f"kind=static,value={streams}",  # prompts that no run before has left in the prefix cache
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    program = str(client("guidellm") / "bin/guidellm")
    variables = environment(home, {"HF_HUB_OFFLINE": "1"})
    run([program, "run", *words, "--disable-progress"], variables, home)
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == REQUESTS
    assert not requests["errored"] + requests["incomplete"]
    metrics: dict[str, Any] = benchmark["metrics"]
    return metrics


def aiperf(service: Service, model: Path, streams: int, home: Path) -> dict[str, Any]:
    """Its report on a run, all of whose requests went well."""
    flags = {
        "model": MODEL,
        "tokenizer": model,  # found as a directory only while the hub is not ruled out
        "url": service.url,
        "endpoint-type": "chat",
        "concurrency": streams,
        "request-count": REQUESTS,
        "isl": PROMPT_TOKENS,
        "isl-stddev": 0,
        "osl": ANSWER_TOKENS,
        "osl-stddev": 0,
        "extra-inputs": "ignore_eos:true",
        "workers-max": 1,
        "ui": "none",
        "artifact-dir": home / "artifacts",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    switches = ("--streaming", "--no-gpu-telemetry", "--no-server-metrics")
    run([str(client("aiperf") / "bin/aiperf"), "profile", *words, *switches], environment(home), home)
    report: dict[str, Any] = json.loads((home / "artifacts/profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == REQUESTS
    assert report["error_summary"] == []
    return report


def agree(theirs: Sequence[float], ours: Sequence[float]) -> None:
    print(f"theirs {theirs} ours {ours} ms")
    assert list(theirs) == pytest.approx(list(ours), rel=AGREE)


@pytest.mark.parametrize("streams", [1, 4])
def test_guidellm_agrees_with_the_histograms(
    streams: int, service: Service, default_model: Path, tmp_path: Path
) -> None:
    histograms = Histograms(service)
    metrics = guidellm(service, default_model, streams, tmp_path)
    ours = histograms.told(REQUESTS)

    def mean(name: str) -> float:
        value: float = metrics[name]["successful"]["mean"]
        return value

    assert mean("output_token_count") == ANSWER_TOKENS
    # Its time per output token counts the first one in: everybody else's is its inter-token latency.
    with_first = (ours.first_ms + (ANSWER_TOKENS - 1) * ours.later_ms) / ANSWER_TOKENS
    names = ("time_to_first_token_ms", "inter_token_latency_ms", "time_per_output_token_ms")
    agree([mean(name) for name in names], [ours.first_ms, ours.later_ms, with_first])


@pytest.mark.parametrize("streams", [1, 4])
def test_aiperf_agrees_with_the_histograms(
    streams: int, service: Service, default_model: Path, tmp_path: Path
) -> None:
    histograms = Histograms(service)
    report = aiperf(service, default_model, streams, tmp_path)
    ours = histograms.told(REQUESTS)
    assert report["usage_completion_tokens"]["avg"] == ANSWER_TOKENS
    names = ("time_to_first_token", "inter_token_latency")
    agree([report[name]["avg"] for name in names], [ours.first_ms, ours.later_ms])
