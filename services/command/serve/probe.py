"""What the decoder's HTTP port tells: whether it is free, whether all is ready, how far it is.

Knows three paths of the API and no more.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from dataclasses import dataclass

_SECONDS = 2.0
_ARENA = re.compile(r'^hotset_arena_bytes\{.*state="(registered|unregistered)".*\} (\S+)$', re.MULTILINE)


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(host: str, port: int) -> bool:
    """Whether the decoder takes requests."""
    return _get(host, port, "/ready")[0] == 200


@dataclass(frozen=True, slots=True)
class StartTold:
    """How far a start is, as the decoder tells it."""

    detail: str = ""
    done_bytes: int = 0  # of the arena, registered with a GPU
    total_bytes: int = 0  # 0 where nothing is registered, or not yet known

    def __str__(self) -> str:
        """What follows a reminder."""
        share = (
            f", {self.done_bytes / self.total_bytes:.0%} of the arena registered" if self.total_bytes else ""
        )
        return f": {self.detail}{share}" if self.detail else ""


def start_told(host: str, port: int) -> StartTold:
    """How far the start is; nothing while nobody answers."""
    status, body = _get(host, port, "/health")
    try:
        detail = str(json.loads(body)["detail"]) if status == 200 else ""
    except (ValueError, LookupError, TypeError):
        return StartTold()
    _, metrics = _get(host, port, "/metrics")
    sizes = {"registered": 0.0, "unregistered": 0.0}
    for state, value in _ARENA.findall(metrics.decode(errors="replace")):
        sizes[state] += float(value)
    done = int(sizes["registered"])
    return StartTold(detail, done, int(sum(sizes.values())) if done else 0)


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body; status 0 where nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
