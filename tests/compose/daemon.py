"""A Docker engine of our own: its socket, data, run and log directories, and an end that takes it all along.

Runs in the caller's namespaces, which must be the test's own: dockerd makes bridges and firewall rules.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.compose.commands import CommandFailed, run
from tests.compose.say import say

_START_SECONDS = 120.0
_STOP_SECONDS = 60.0


def environment(engine: Path, place: Path) -> dict[str, str]:
    """For every Docker program: the unpacked packages first, our engine, and no setting of the user's.

    Args:
        engine: stands for / of the packages.
        place: the test's own directory.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOTSET_", "DOCKER_", "COMPOSE_"))
    }
    libraries = [*engine.glob("usr/lib/*-linux-gnu"), *engine.glob("lib/*-linux-gnu")]
    programs = [engine / "usr/sbin", engine / "usr/bin", engine / "sbin", engine / "bin"]
    path = [*map(str, programs), kept.get("PATH", ""), "/usr/sbin", "/sbin"]
    return {
        **kept,
        "PATH": ":".join(path),
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "XTABLES_LIBDIR": ":".join([*(f"{library}/xtables" for library in libraries), *_SYSTEM_XTABLES]),
        "DOCKER_HOST": f"unix://{place}/docker.sock",
        "DOCKER_CONFIG": f"{place}/client",
        "HOME": str(place),
    }


_SYSTEM_XTABLES = ("/usr/lib/x86_64-linux-gnu/xtables", "/usr/lib/aarch64-linux-gnu/xtables")


@contextmanager
def docker(env: Mapping[str, str], place: Path) -> Iterator[None]:
    """A running engine; on the way out it is stopped, and whoever comes from it.

    Raises:
        CommandFailed: it does not start; with its log's end.
    """
    log = place / "dockerd.log"
    command = ["dockerd", "--host", env["DOCKER_HOST"], "--data-root", str(place / "data")]
    command += ["--exec-root", str(place / "exec"), "--pidfile", str(place / "docker.pid")]
    command += ["--exec-opt", "native.cgroupdriver=cgroupfs", "--cgroup-parent", f"/{place.name}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
    try:
        _wait_for(process, env, log)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            say("dockerd does not stop by itself; it is killed")
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], env: Mapping[str, str], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            run(["docker", "version"], env=env, seconds=30)
        except CommandFailed as error:
            if process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise CommandFailed(f"dockerd does not start: {error}\n{log.read_text()[-4000:]}") from error
        return
