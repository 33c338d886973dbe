"""A real Prometheus over some targets, with the configuration and the rules that are deployed.

Knows its command line and HTTP API. It scrapes every second instead of every five.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from tests.observe.boards import ROOT

PATIENCE_SECONDS = 120.0
_LISTENS = re.compile(r'msg="Listening on" address=(\S+)')


class Series(NamedTuple):
    labels: Mapping[str, str]
    points: list[tuple[float, float]]  # when, Unix seconds; value


def eventually(what: str, true: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


class Prometheus:
    """What one has scraped."""

    def __init__(self, url: str, client: httpx.Client) -> None:
        self._url = url
        self._client = client

    def ask(self, path: str, **parameters: object) -> Any:
        given = {name: str(value) for name, value in parameters.items()}
        body = self._client.get(f"{self._url}/api/v1/{path}", params=given).json()
        assert body["status"] == "success", body
        return body["data"]

    def now(self, expr: str) -> list[Series]:
        """An instant query; of a range vector, all points of its window."""
        found = self.ask("query", query=expr)["result"]
        return [_series(one) for one in found]

    def over(self, expr: str, start: float, end: float, step: float = 1.0) -> list[Series]:
        """A query over a time, as a panel asks it."""
        found = self.ask("query_range", query=expr, start=start, end=end, step=step)["result"]
        return [_series(one) for one in found]

    def scrapes(self, expr: str, seconds: int = 600) -> list[Series]:
        """Every sample of a selector, at the times of its scrapes."""
        return self.now(f"{expr}[{seconds}s]")


def _series(found: Mapping[str, Any]) -> Series:
    points = found.get("values") or [found["value"]]
    return Series(found["metric"], [(float(when), float(value)) for when, value in points])


@contextmanager
def running_prometheus(
    program: str, directory: Path, targets: Mapping[str, Sequence[str]]
) -> Iterator[Prometheus]:
    """Scraping `targets`, addresses by the name of their job in deploy/prometheus/prometheus.yml."""
    settings = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    settings["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(ROOT / "deploy/prometheus/rules/*.yml")]
    for job in settings["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    config = directory / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings))
    log = directory / "prometheus.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            return bool(_LISTENS.search(log.read_text()))

        eventually("Prometheus listens", listens)
        found = _LISTENS.search(log.read_text())
        assert found is not None
        url = f"http://{found[1]}"
        with httpx.Client(timeout=60) as client:

            def ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return client.get(f"{url}/-/ready").status_code == 200
                return False

            eventually("Prometheus is ready", ready)
            yield Prometheus(url, client)
    finally:
        process.terminate()
        process.wait(60)
