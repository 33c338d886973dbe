"""Addresses of TCP responders, and the names of their lanes.

Knows how they are written; opens nothing.
"""

from __future__ import annotations

import socket


def parse_address(address: bytes) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`.

    Raises:
        ValueError: it is none.
    """
    host, separator, port = address.decode("ascii").rpartition(":")
    if not separator or not host:
        raise ValueError(f"{address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def write_address(listening: socket.socket) -> bytes:
    """Where a listening socket is found."""
    host, port = listening.getsockname()[:2]
    return (f"[{host}]:{port}" if ":" in host else f"{host}:{port}").encode()


def lane_of(connected: socket.socket) -> str:
    """What carries a connection's bytes, as a label."""
    try:
        host = connected.getsockname()[0]
    except OSError:  # closed
        return "tcp/none"
    return f"tcp/{host}"
