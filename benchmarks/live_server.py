"""Both services as `make run` starts them, for benchmarks that ask over HTTP.

Knows how to start, await, scrape and end them; nothing of what is asked.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from services.command.server import Server

_START_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class LiveServer:
    """One that is ready."""

    port: int
    log: Path

    @property
    def reached(self) -> Server:
        """It, as its clients reach it."""
        return Server("127.0.0.1", self.port)


@contextmanager
def live_server(
    log: Path,
    decoder: Sequence[str] = (),
    kvstore: Sequence[str] = (),
    *,
    model: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[LiveServer]:
    """Start both, and end them afterwards.

    Args:
        log: where their messages go.
        decoder: its flags.
        kvstore: its flags.
        model: a checkpoint; the bundled one if None.
        environment: added to this process's.

    Raises:
        RuntimeError: they did not get ready; the message ends with the log's last lines.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    asked = ["serve", "--port", str(port), *decoder, f"--store-args={shlex.join(kvstore)}"]
    if model is not None:
        asked += ["--model", str(model)]
    with log.open("w") as messages:
        child = subprocess.Popen(
            [sys.executable, "-m", "services.command", *asked],
            env={**os.environ, **(environment or {})},
            stdout=messages,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _is_ready(port):
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not get ready:\n" + log.read_text()[-2000:])
            time.sleep(0.2)
        yield LiveServer(port, log)
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(60)


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
