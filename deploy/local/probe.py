"""What the decoder's HTTP port tells: whether it is free, whether all is ready, which model is served.

Knows three paths of the API and no more.
"""

from __future__ import annotations

import http.client
import json
import socket

_SECONDS = 2.0


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


def model_name(host: str, port: int, otherwise: str) -> str:
    """The name that a client must use; `otherwise` where the server keeps it from us (API keys)."""
    status, body = _get(host, port, "/v1/models")
    try:
        return str(json.loads(body)["data"][0]["id"]) if status == 200 else otherwise
    except (ValueError, LookupError, TypeError):
        return otherwise


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
