"""Two hosts on this machine: network namespaces with a cable between them, made and taken away again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    """A namespace; `before` is the command that runs another in it."""

    name: str
    device: str
    address: str

    @property
    def before(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def link(self, state: str) -> None:
        """Plug the cable in or out: up or down."""
        _run("ip", "-n", self.name, "link", "set", self.device, state)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips the test where this user may not make namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = os.getpid() % 100_000
    hosts = tuple(
        Host(f"hotset-{mark}-{side}", f"hs{mark}{side}", f"10.213.77.{number}")
        for number, side in enumerate("ab", 1)
    )
    made = []
    try:
        try:
            for host in hosts:
                _run("ip", "netns", "add", host.name)
                made.append(host)
            one, other = hosts
            _run("ip", "link", "add", one.device, "type", "veth", "peer", "name", other.device)
            for host in hosts:
                _run("ip", "link", "set", host.device, "netns", host.name)
                _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
                for device in (host.device, "lo"):
                    _run("ip", "-n", host.name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield one, other
    finally:
        for host in made:
            subprocess.run(("ip", "netns", "del", host.name), check=False, capture_output=True, timeout=20)
