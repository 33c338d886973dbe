"""Where promtool and prometheus are: on the PATH, or unpacked from Debian's package into the cache, once.

`python -m tests.observe.programs` unpacks them beforehand. Needs no root and starts no service: a package is
downloaded and unpacked, not installed. Knows apt and dpkg.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = "prometheus"
_DOWNLOAD_SECONDS = 240


class NotHere(Exception):
    """The programs are neither installed nor to be had; the message says why and what to do."""


class Programs(NamedTuple):
    """Paths of the two."""

    prometheus: str
    promtool: str


def cache_directory() -> Path:
    """Where the unpacked package stays."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotset" / "debian-prometheus"


def programs() -> Programs:
    """Both, downloaded if need be.

    Raises:
        NotHere: they cannot be had.
    """
    on_path = [shutil.which(name) for name in Programs._fields]
    if on_path[0] and on_path[1]:
        return Programs(on_path[0], on_path[1])
    home = cache_directory()
    found = Programs(*(str(home / "usr/bin" / name) for name in Programs._fields))
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once download it once
        if not all(map(os.access, found, [os.X_OK] * len(found))):
            _unpack(home)
    return found


def _unpack(home: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise NotHere("no prometheus and promtool on the PATH, and no apt-get and dpkg to unpack them with")
    with tempfile.TemporaryDirectory(dir=home.parent, prefix="prometheus-") as directory:
        temporary = Path(directory)
        _download(temporary)
        [package] = temporary.glob("*.deb")
        _run(["dpkg", "-x", str(package), str(temporary / "tree")], temporary)
        shutil.rmtree(home, ignore_errors=True)
        (temporary / "tree").rename(home)


def _download(directory: Path) -> None:
    """Into `directory`; with package lists of our own where the machine's are missing or too old."""
    try:
        _run(["apt-get", "download", PACKAGE], directory)
    except NotHere:
        lists = directory / "lists"
        (lists / "partial").mkdir(parents=True)
        own = [
            "-o",
            f"Dir::State::Lists={lists}",
            "-o",
            f"Dir::Cache={directory}",
            "-o",
            "APT::Sandbox::User=root",
        ]
        _run(["apt-get", *own, "update"], directory)
        _run(["apt-get", *own, "download", PACKAGE], directory)


def _run(command: Sequence[str], directory: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotHere(f"{' '.join(command)} did not end within {_DOWNLOAD_SECONDS} s") from error
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise NotHere(
            f"{' '.join(command)}: {' '.join(last)}; install Debian's {PACKAGE}, or put both on the PATH"
        )


if __name__ == "__main__":
    try:
        print(*programs(), sep="\n")
    except NotHere as error:
        sys.exit(f"error: {error}")
