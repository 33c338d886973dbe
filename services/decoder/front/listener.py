"""The HTTP server's socket, taken before anything is started, so that a taken port is found at once."""

from __future__ import annotations

import socket

from services.contract.errors import SetupError

_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Args:
        host: name or address.
        port: 0 = any free one.

    Raises:
        SetupError: no such address, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise SetupError(f"cannot listen on {host}: {error.strerror}; choose another with --host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise SetupError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port"
        ) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where the server is found."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
