"""What the front itself measures: requests and their times. The engine's figures: collector.py.

Knows prometheus-client and clocks. One instance a process, made at start and passed by hand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.08,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
)
_REQUEST = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)

Endpoint = Literal["chat", "completions"]
Outcome = Literal["stop", "length", "abort", "refused", "error"]

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


class ChoiceClock:
    """When one choice's tokens came."""

    def __init__(self, began: float, engine: int) -> None:
        """Begin at `began`, monotonic seconds, when its HTTP request came; `engine` answers."""
        self.began = began
        self.engine = engine
        self.first: float | None = None
        self.last = began
        self.tokens = 0

    @property
    def seconds(self) -> float:
        """From the request to the newest token."""
        return self.last - self.began


class RequestMetrics:
    """Counters and histograms of the front, in a registry of their own."""

    def __init__(self, registry: CollectorRegistry, engines: Sequence[int] = (0,)) -> None:
        """Register every metric in `registry`; figures of these engines begin at 0."""
        self._http = Counter(
            "hotset_http_requests",
            "HTTP requests answered, by route and status.",
            ("method", "path", "status"),
            registry=registry,
        )
        self._choices = Counter(
            "hotset_requests",
            "Choices ended, by how: stop, length, abort (the client left), refused (4xx) or error.",
            ("endpoint", "outcome"),
            registry=registry,
        )
        self._resubmitted = Counter(
            "hotset_requests_resubmitted",
            "Choices handed to the engine after the life of the one that had them ended.",
            ("engine",),
            registry=registry,
        )
        self._first_token = Histogram(
            "hotset_time_to_first_token_seconds",
            "From a request's arrival to a choice's first token.",
            ("engine",),
            registry=registry,
            buckets=_FIRST_TOKEN,
        )
        self._per_token = Histogram(
            "hotset_time_per_output_token_seconds",
            "Mean time between a choice's tokens after its first, once a choice.",
            ("engine",),
            registry=registry,
            buckets=_TOKEN,
        )
        self._between = Histogram(
            "hotset_inter_token_seconds",
            "Time between two tokens of a choice, once a token after the first.",
            ("engine",),
            registry=registry,
            buckets=_TOKEN,
        )
        self._request = Histogram(
            "hotset_request_seconds",
            "From a request's arrival to a choice's end, for choices that end by themselves.",
            ("engine",),
            registry=registry,
            buckets=_REQUEST,
        )
        for endpoint in get_args(Endpoint):
            for outcome in get_args(Outcome):
                self._choices.labels(endpoint, outcome)
        of_engines = (self._resubmitted, self._first_token, self._per_token, self._between, self._request)
        for engine in engines:
            for metric in of_engines:
                metric.labels(str(engine))
        # What is observed for every token is not looked up for every token.
        self._between_of = {engine: self._between.labels(str(engine)) for engine in engines}

    def http(self, method: str, path: str, status: int) -> None:
        """An HTTP request was answered; `path` is its route, never what a client made up."""
        self._http.labels(method if method in METHODS else "other", path, str(status)).inc()

    def resubmitted(self, engine: int, choices: int) -> None:
        """So many choices were handed to the next life of an engine."""
        self._resubmitted.labels(str(engine)).inc(choices)

    def tokens(self, clock: ChoiceClock, count: int) -> None:
        """`count` tokens of a choice came, at least one; those that came together share the wait."""
        now = time.monotonic()
        if clock.first is None:
            clock.first = now
            self._first_token.labels(str(clock.engine)).observe(now - clock.began)
            later = 0  # with the first came the others: no time lies between them
        else:
            later = count
        for _ in range(later):
            self._between_of[clock.engine].observe((now - clock.last) / count)
        clock.tokens += count
        clock.last = now

    def ended(self, endpoint: Endpoint, outcome: Outcome, clock: ChoiceClock | None = None) -> None:
        """A choice ended; its `clock` is given if it ended by itself."""
        self._choices.labels(endpoint, outcome).inc()
        if clock is None:
            return
        self._request.labels(str(clock.engine)).observe(time.monotonic() - clock.began)
        if clock.first is not None and clock.tokens > 1:
            per_token = (clock.last - clock.first) / (clock.tokens - 1)
            self._per_token.labels(str(clock.engine)).observe(per_token)
