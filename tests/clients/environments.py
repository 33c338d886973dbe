"""Each client in an environment of its own, made in the cache from exact pins, once.

`python -m tests.clients.environments` makes them all beforehand. Knows pip, npm and `pins/`: a list of Python
packages (*.txt) or a package.json (*.json) a client, everything that it needs with its version. The project's
own environment is never touched.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PINS = Path(__file__).parent / "pins"
_WITH_TORCH = ("guidellm",)
_STAMP = "made-from"
_INSTALL_SECONDS = 1200


class CannotInstall(Exception):
    """A client's packages are not to be had; the message is the installer's."""


def client(name: str) -> Path:
    """Directory of the environment of `pins/NAME.txt` or `pins/NAME.json`; programs lie in its `bin`.

    Raises:
        CannotInstall: pip or npm failed.
    """
    home = _cache() / name
    home.parent.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once make it once
        wanted = _digest(name)
        stamp = home / _STAMP
        if not stamp.is_file() or stamp.read_text() != wanted:
            shutil.rmtree(home, ignore_errors=True)
            _make(home, name)
            stamp.write_text(wanted)  # an interrupted installation leaves none behind
    return home


def environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for a client that lives in `home`, and that nothing of the project's Python reaches."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    kept = {name: value for name, value in kept.items() if not name.startswith(("HOTSET_", "OPENAI_"))}
    return (
        kept | {"HOME": str(home), "XDG_CACHE_HOME": str(home), "OPENAI_API_KEY": "none"} | dict(more or {})
    )


def node_path() -> str:
    """A PATH on which our node and npm come first."""
    return f"{client('node') / 'bin'}{os.pathsep}{os.environ['PATH']}"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotset" / "clients"


def _pins(name: str) -> Path:
    package = PINS / f"{name}.json"
    return package if package.exists() else PINS / f"{name}.txt"


def _torch() -> str:
    return os.environ.get("TORCH") or "torch==2.13.0"


def _digest(name: str) -> str:
    parts = [_pins(name).read_text(), sys.version, _torch() if name in _WITH_TORCH else ""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _make(home: Path, name: str) -> None:
    pins = _pins(name)
    print(f"installing {name} into {home}", file=sys.stderr, flush=True)
    if pins.suffix == ".json":
        home.mkdir()
        shutil.copy(pins, home / "package.json")
        flags = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts")
        _run(["npm", "install", *flags], home, os.environ | {"PATH": node_path()})
        return
    _run([sys.executable, "-m", "venv", "--without-pip", str(home)], home.parent)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install", "--no-input"]
    pip += ["--disable-pip-version-check", "--no-compile", "--quiet"]
    _run([*pip, "--no-deps", "--requirement", str(pins)], home)  # the list is complete
    if name in _WITH_TORCH:
        _run([*pip, *shlex.split(_torch())], home)


def _run(command: Sequence[str], directory: Path, variables: Mapping[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotInstall(f"{shlex.join(command)} did not end within {_INSTALL_SECONDS} s") from error
    if done.returncode:
        raise CannotInstall(f"{shlex.join(command)}: {(done.stderr or done.stdout)[-2000:]}")


def main() -> int:
    """Exit status: 0 all are there, 1 one cannot be made."""
    for pins in sorted(PINS.iterdir()):
        try:
            client(pins.stem)
        except CannotInstall as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
