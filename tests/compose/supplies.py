"""What the compose test needs from outside, fetched once and kept: Docker, a Debian, wheels, a model.

Nothing is installed on this machine: Debian's packages are unpacked in the cache and used from there. What a
directory of the cache was made from is in its name, so a change of the recipe makes another.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deploy.docker.requirements import BUILD, requirements
from deploy.lock import LOCK, ROOT
from services.decoder.models.bundled.directory import default_cache_directory, default_model
from tests.compose.commands import CommandFailed, run
from tests.compose.say import step

_DEBIAN = "python3,python3-venv,wget"
_MAKE_DEBIAN = """
mount -t tmpfs -o size=2g,mode=755 tmpfs "$1"
export DEBOOTSTRAP_DIR="$2/usr/share/debootstrap"
sh "$2/usr/sbin/debootstrap" --variant=minbase --include="$3" "$4" "$1"
tar -C "$1" --exclude=./var/cache/apt --exclude=./var/lib/apt/lists -cf "$5" .
"""
"""In memory, as dpkg waits for the disk after every file; run in a mount namespace, which forgets it."""


@dataclass(frozen=True)
class Supplies:
    """Where everything lies."""

    engine: Path  # stands for / of the unpacked packages
    prometheus: Path  # the program
    debian: Path  # a tar of a small Debian with Python
    wheels: Path  # a directory
    model: Path  # the default model's checkpoint


def stock(torch: str) -> Supplies:
    """What is there already, and the rest fetched; `torch` is what pip is given for it.

    Raises:
        CommandFailed: something cannot be fetched.
    """
    cache = default_cache_directory() / "compose-test"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        model = pool.submit(default_model)
        suite = codename()
        engine = _kept(cache, "engine", suite, _unpack_engine)
        prometheus = _kept(cache, "prometheus", suite, _unpack_prometheus)
        wheels = pool.submit(_wheels, cache, torch)
        debian = _kept(
            cache, "debian", f"{suite} {_DEBIAN} {_MAKE_DEBIAN}", lambda to: _make_debian(engine, suite, to)
        )
        return Supplies(
            engine, prometheus / "usr/bin/prometheus", debian / "debian.tar", wheels.result(), model.result()
        )


def codename() -> str:
    """This machine's release of Debian or of what stems from it; "" elsewhere."""
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return ""
    return dict(line.split("=", 1) for line in lines if "=" in line).get("VERSION_CODENAME", "").strip('"')


def _kept(cache: Path, name: str, recipe: str, make: Callable[[Path], None]) -> Path:
    """The directory that `make` fills, from an earlier run if the recipe is the same; whole or absent."""
    final = cache / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if final.is_dir():
        return final
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with step(f"fetching: {name}"):
        make(partial)
    for old in cache.glob(f"{name}-*"):
        if old != partial:
            shutil.rmtree(old)
    return partial.rename(final)


def _unpack_engine(to: Path) -> None:
    archives = to / "archives"
    (archives / "partial").mkdir(parents=True)
    _apt(
        "install",
        "--reinstall",
        "--download-only",
        "-o",
        f"Dir::Cache::archives={archives}",
        "docker.io",
        "debootstrap",
    )
    for package in archives.glob("*.deb"):
        run(["dpkg", "-x", package, to])
    shutil.rmtree(archives)
    for name in ("iptables", "ip6tables"):  # packages leave these links to their installation
        program = to / "usr/sbin" / name
        if not program.exists() and program.with_name(f"{name}-nft").exists():
            program.symlink_to(f"{name}-nft")


def _unpack_prometheus(to: Path) -> None:
    archives = to / "archives"
    archives.mkdir()
    run(["apt-get", "download", "-o", "APT::Sandbox::User=root", "prometheus"], cwd=archives)
    for package in archives.glob("*.deb"):
        run(["dpkg", "-x", package, to])
    shutil.rmtree(archives)


def _apt(*words: str) -> None:
    command = ["apt-get", "-y", "--no-install-recommends", "-o", "APT::Sandbox::User=root", *words]
    try:
        run(command)
    except CommandFailed:  # a fresh machine has no lists yet, and old ones name packages that are gone
        run(["apt-get", "update"])
        run(command)


def _make_debian(engine: Path, suite: str, to: Path) -> None:
    root = to / "root"
    root.mkdir()
    make: list[str | Path] = ["sh", "-euc", _MAKE_DEBIAN, "sh", root, engine, _DEBIAN, suite]
    run(["unshare", "--mount", *make, to / "debian.tar"], seconds=900)
    root.rmdir()


def _wheels(cache: Path, torch: str) -> Path:
    """Of all that both images install, for the Python of this machine's Debian."""
    found = re.search(r"Candidate: (3\.\d+)", run(["apt-cache", "policy", "python3"]))
    if found is None:
        raise CommandFailed("apt-cache policy python3: no version; run apt-get update")
    project = ROOT / "pyproject.toml"
    wanted = [
        *shlex.split(torch),
        *requirements(project, ["decoder", "events"]),
        *requirements(project, [BUILD]),
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    command += ["--python-version", found[1], "--constraint", str(LOCK), *wanted]
    recipe = f"{' '.join(command)}\n{LOCK.read_text()}"
    return _kept(cache, "wheels", recipe, lambda to: _download(command, to))


def _download(command: list[str], to: Path) -> None:
    run([*command, "--dest", to], seconds=1200)
