"""A router as a process, in front of decoders, started as docs/scaling.md says."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deploy.local.probe import free_port
from tests.front.live import until

COMMANDS = {"vllm": ("vllm-router",), "sglang": ("sglang-router", "launch")}
START_SECONDS = 90.0


@contextmanager
def router(kind: str, workers: Sequence[str], *flags: str) -> Iterator[str]:
    """Its address, once it knows the model of its workers."""
    program, *words = COMMANDS[kind]
    path = shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{program} is not installed: pip install 'hotset[routers]', or make test-routers")
    port = free_port()
    always = {
        "host": "127.0.0.1",
        "port": port,
        "prometheus-host": "127.0.0.1",
        "prometheus-port": free_port(),
        "worker-startup-check-interval": 1,
        "health-check-interval-secs": 1,
    }
    given = [word for name, value in always.items() for word in (f"--{name}", str(value))]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [path, *words, *given, "--worker-urls", *workers, *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )

        def said() -> str:
            log.seek(0)
            return log.read().decode("utf-8", "replace")

        def knows_them() -> bool:
            assert process.poll() is None, said()
            try:
                return "fake" in httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=30).text
            except httpx.HTTPError:
                return False

        try:
            until(knows_them, "the router to know its workers", START_SECONDS)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
