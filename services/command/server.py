"""A running server, as its clients reach it: address, key, JSON, streamed events, metrics.

Knows HTTP; nothing of what is asked. Every failure is told as a person at a terminal needs it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from services.contract.errors import InvalidRequest, SetupError, Unavailable

DEFAULT_URL = "http://127.0.0.1:8000"
_PORTS = {"http": 80, "https": 443}
_EVENT = b"data: "


@dataclass(frozen=True, slots=True)
class Server:
    """Where it is, and what it is shown. Make one with `at`."""

    host: str
    port: int
    secure: bool = False  # https
    key: str = ""
    timeout_seconds: float = 600.0

    @classmethod
    def at(cls, url: str, key: str = "") -> Server:
        """The server at `url`; `host:port` means http.

        Raises:
            SetupError: it is no address of a server.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise SetupError(f"{url} has no usable port: {error}") from error
        if parts.scheme not in _PORTS or not parts.hostname:
            raise SetupError(f"{url} is no server's address; write it as {DEFAULT_URL}")
        if parts.path.rstrip("/") not in ("", "/v1"):
            raise SetupError(f"{url}: leave out the path {parts.path}; the server's own paths are known")
        return cls(parts.hostname, port or _PORTS[parts.scheme], parts.scheme == "https", key)

    @property
    def url(self) -> str:
        """As it is written."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.secure else ''}://{host}:{self.port}"

    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path: str) -> bytes:
        """A body.

        Raises:
            Unavailable: nobody answers, or not now.
            InvalidRequest: the server refuses; the message is its own.
        """
        with self._asked("GET", path) as response:
            return response.read()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that answers the JSON `body`; errors as of `get`."""
        with self._asked("POST", path, body) as response:
            return json.loads(response.read())

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events that answer `body`, as they come; closing the iterator closes the connection, which
        ends the answer at the server. Errors as of `get`.
        """
        with self._asked("POST", path, {**body, "stream": True}) as response:
            while line := response.readline():
                if line.startswith(_EVENT):
                    text = line.removeprefix(_EVENT).strip()
                    if text == b"[DONE]":
                        return
                    event = json.loads(text)
                    if "error" in event:
                        raise Unavailable(
                            str(event["error"].get("message", "the server stopped this answer"))
                        )
                    yield event
            raise Unavailable(f"{self.url} broke the answer off; its log says why")

    def model(self) -> dict[str, Any]:
        """What /v1/models says of the model served; errors as of `get`."""
        found: dict[str, Any] = json.loads(self.get("/v1/models"))["data"][0]
        return found

    def metrics(self) -> dict[str, float]:
        """Every metric, summed over its labels; errors as of `get`."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").decode()):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    @contextmanager
    def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=self.timeout_seconds)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"content-type": "application/json", **self.headers()})
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(self, path, response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self, error) from error
        finally:
            connection.close()


def unreachable(server: Server, error: Exception) -> Unavailable:
    """What to tell when there is no connection, or none any more."""
    if isinstance(error, ConnectionRefusedError):
        return Unavailable(
            f"nobody listens at {server.url}; start a server with `hotset serve`, or name another with --url"
        )
    if isinstance(error, socket.gaierror):
        return Unavailable(f"the name {server.host} is not known; name another server with --url")
    return Unavailable(f"{server.url} does not answer as a server should: {error or type(error).__name__}")


def refusal(status: int, body: bytes) -> str:
    """What an error body says; its beginning, where it is not OpenAI's."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {status}: {body[:200].decode(errors='replace')}"


def _refusal(server: Server, path: str, status: int, body: bytes) -> Unavailable | InvalidRequest:
    told = refusal(status, body)
    if status == 401:
        return InvalidRequest(
            f"{server.url} wants a key that it knows: --key KEY, or HOTSET_API_KEY in the environment"
        )
    if status == 404 and b"error" not in body:
        return InvalidRequest(f"{server.url} has no {path}: it is no hotset server")
    return Unavailable(told) if status in (429, 503) else InvalidRequest(told)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """--url and --key."""
    parser.add_argument("--url", default=DEFAULT_URL, help="of the server (default: %(default)s)")
    parser.add_argument(
        "--key",
        default=os.environ.get("HOTSET_API_KEY", ""),
        help="API key, where the server wants one; HOTSET_API_KEY keeps it out of the list of processes",
    )
