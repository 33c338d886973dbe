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
    """A namespace, or this one, which has no name; `before` is the command that runs another in it."""

    name: str
    device: str
    address: str

    @property
    def before(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name) if self.name else ()

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


@contextmanager
def another_host(megabytes_a_second: int) -> Iterator[tuple[Host, Host]]:
    """This host and another, with a cable between them that carries so much; skips as `two_hosts`."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = os.getpid() % 100_000
    here = Host("", f"hs{mark}h", "10.213.78.1")
    there = Host(f"hotset-{mark}-t", f"hs{mark}t", "10.213.78.2")
    try:
        try:
            _run("ip", "netns", "add", there.name)
            _run("ip", "link", "add", here.device, "type", "veth", "peer", "name", there.device)
            _run("ip", "link", "set", there.device, "netns", there.name)
            for host, where in ((here, ()), (there, ("-n", there.name))):
                _run("ip", *where, "addr", "add", f"{host.address}/24", "dev", host.device)
                _run("ip", *where, "link", "set", host.device, "up")
            _run("ip", "-n", there.name, "link", "set", "lo", "up")
            rate = ("rate", f"{8 * megabytes_a_second}mbit", "burst", "64kb", "latency", "400ms")
            _run("tc", "-n", there.name, "qdisc", "add", "dev", there.device, "root", "tbf", *rate)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
        yield here, there
    finally:
        subprocess.run(("ip", "netns", "del", there.name), check=False, capture_output=True, timeout=20)
        subprocess.run(("ip", "link", "del", here.device), check=False, capture_output=True, timeout=20)
