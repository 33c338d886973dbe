"""`python -m tests.compose [--require]`: fetch what is needed, test in namespaces, look for what is left.

Exit status: 0 passed, or skipped where this machine cannot; 1 failed, or it cannot and `--require` was given.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from deploy.lock import ROOT
from tests.compose import leftovers
from tests.compose.commands import CommandFailed, run
from tests.compose.say import say
from tests.compose.supplies import Supplies, codename, stock

_PREFIX = "hotset-compose-"
_TEST_SECONDS = 1500.0
_END_SECONDS = 60.0
_PROGRAMS = ("apt-get", "dpkg", "unshare", "setpriv", "ip", "tar")


def main() -> int:
    """Exit status: see above."""
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument("--require", action="store_true", help="fail where this machine cannot run the test")
    required = parser.parse_args().require
    lacking = _lacking()
    if lacking:
        say(f"{'FAILED' if required else 'skipped'}: it needs {lacking}")
        return 1 if required else 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    torch = os.environ.get("TORCH") or "torch==2.13.0"
    try:
        supplies = stock(torch)
        say(f"all that is needed is here after {time.monotonic() - start:.1f} s")
        _clear_up_after_the_dead()
        status = _test(supplies, torch)
    except CommandFailed as error:
        say(f"FAILED: {error}")
        return 1
    say(f"{'passed' if status == 0 else 'FAILED'} after {time.monotonic() - start:.0f} s")
    return status


def _lacking() -> str:
    """What this machine lacks for the test; "" if nothing."""
    if os.geteuid() != 0:
        return "root, to run a Docker engine of its own"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing or not codename():
        return f"Debian or what stems from it, with {', '.join(missing or _PROGRAMS)}"
    try:
        run(["unshare", "--mount", "--net", "--ipc", "--pid", "--fork", "--mount-proc", "true"], seconds=60)
    except CommandFailed as error:
        return f"namespaces: {error}"
    return ""


def _test(supplies: Supplies, torch: str) -> int:
    place = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # says that this run lives
        try:
            status = _in_namespaces(supplies, torch, place)
        finally:
            namespaces = set((place / "namespaces").read_text().split()) - leftovers.namespaces_of("self")
            _wait_for_the_end_of(namespaces)
            shutil.rmtree(place)
    if len(namespaces) != 4:
        say(f"FAILED: it had {len(namespaces)} namespaces of its own and not 4")
        return 1
    found = leftovers.left_by(place, namespaces)
    for line in found:
        say(f"FAILED: left behind: {line}")
    if not found:
        say("nothing is left: no process, namespace (so no mount, interface, chain), cgroup or directory")
    return 1 if found else status


def _in_namespaces(supplies: Supplies, torch: str, place: Path) -> int:
    """The status of the test proper, which ends with us whatever ends us."""
    (place / "namespaces").touch()
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--net", "--ipc", "--pid", "--fork"]
    command += ["--kill-child", "--mount-proc"]
    command += [str(supplies.engine / "usr/bin/docker-init"), "--"]  # collects orphans
    command += [sys.executable, "-m", "tests.compose.inside", "--place", str(place), "--torch", torch]
    command += [word for name, path in asdict(supplies).items() for word in (f"--{name}", str(path))]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        return process.wait(_TEST_SECONDS)
    except subprocess.TimeoutExpired:
        say(f"FAILED: not done after {_TEST_SECONDS:.0f} s")
        return 1
    finally:
        process.kill()  # the namespaces' first process goes with it, and with that all others
        process.wait()


def _wait_for_the_end_of(namespaces: set[str]) -> None:
    """Nobody lives in them any more; after a kill that takes the kernel a moment."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        living = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        if not any(namespaces & leftovers.namespaces_of(name) for name in living):
            return
        time.sleep(0.2)


def _clear_up_after_the_dead() -> None:
    """Directories of runs that were killed: the kernel took everything else, and let go of their locks."""
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            with (place / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        shutil.rmtree(place, ignore_errors=True)
        leftovers.left_by(place, set())


if __name__ == "__main__":
    sys.exit(main())
