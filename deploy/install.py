"""`python -m deploy.install EXTRA ...`: bring the virtual environment up to date, if anything changed.

Knows pip, the environment's directory ($VENV) and what to ask of torch ($TORCH); nothing of what runs
in it. Needs only the standard library: it is the first thing that runs on a fresh machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_STAMP = "hotset-installed.json"


class InstallError(Exception):
    """The environment cannot be made; the message says what to do."""


def inputs_digest(root: Path, python_version: str, torch: str) -> str:
    """What an installation depends on, as one hash: equal digests need no pip."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    build = {"project": project["project"], "build-system": project["build-system"]}
    build["hatch"] = project["tool"]["hatch"]
    parts = [str(root), python_version, torch, json.dumps(build, sort_keys=True)]
    sources = [root / "proto/build_stubs.py", *sorted((root / "proto").rglob("*.proto"))]
    parts += [path.read_text() for path in sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def missing_extras(venv: Path, digest: str, extras: Sequence[str]) -> set[str]:
    """Extras that the environment still lacks: all that it ever had, once an input changed."""
    try:
        stamp = json.loads((venv / _STAMP).read_text())
    except (OSError, ValueError):
        return {*extras}
    if stamp["digest"] != digest:
        return {*extras, *stamp["extras"]}
    return {*extras} - {*stamp["extras"]}


def has_stubs(root: Path) -> bool:
    """Whether every .proto has its generated module beside it."""
    protos = (root / "proto").rglob("*.proto")
    return all(path.with_name(f"{path.stem}_pb2.py").is_file() for path in protos)


def environment_version(venv: Path) -> str:
    """Python version of a working environment with pip, or "" where there is none."""
    look = (
        "import importlib.util as u, platform; print(u.find_spec('pip') and platform.python_version() or '')"
    )
    try:
        answer = subprocess.run([venv / "bin/python", "-c", look], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return answer.stdout.strip()


def make_environment(venv: Path, *, remake: bool) -> str:
    """An environment in `venv`, kept if it works; the version of its Python.

    Args:
        venv: its directory.
        remake: replace one of another Python than the one that runs this.

    Raises:
        InstallError: this Python cannot make environments.
    """
    version = environment_version(venv)
    ours = "{}.{}.{}".format(*sys.version_info[:3])
    if version and (version == ours or not remake):
        return version
    if Path(sys.prefix) == venv:
        raise InstallError(f"{venv} is damaged (it has no pip); remove it and run this again: rm -r {venv}")
    print(f"making {venv} with Python {ours}", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    result = subprocess.run([sys.executable, "-m", "venv", venv], check=False)
    if result.returncode != 0 or not environment_version(venv):
        shutil.rmtree(venv, ignore_errors=True)
        raise InstallError(
            f"{sys.executable} cannot make a virtual environment with pip; on Debian and Ubuntu install the "
            "package python3-venv, or name another interpreter: make PYTHON=/path/to/python3.12"
        )
    return ours


def install(root: Path, venv: Path, torch: str, extras: Sequence[str], *, remake: bool) -> None:
    """Install the project editable with `extras`, unless that was done before from the same inputs.

    Raises:
        InstallError: no environment can be made, or pip fails.
    """
    digest = inputs_digest(root, make_environment(venv, remake=remake), torch)
    missing = missing_extras(venv, digest, extras)
    if not missing and has_stubs(root):
        return
    stamp = venv / _STAMP
    known = set(json.loads(stamp.read_text())["extras"]) if stamp.is_file() else set()
    wanted = sorted(known | {*extras})
    stamp.unlink(missing_ok=True)  # an interrupted pip leaves no stamp behind
    print(f"installing hotset[{','.join(wanted)}] into {venv}; the first time takes minutes", flush=True)
    command = [str(venv / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--editable", f".[{','.join(wanted)}]"]
    if "decoder" in wanted:
        command += shlex.split(torch)
    status = subprocess.run(command, cwd=root, check=False).returncode
    if status != 0:
        raise InstallError(f"pip failed with status {status}; its message is above")
    stamp.write_text(json.dumps({"digest": digest, "extras": wanted}))


def main() -> int:
    """Exit status: 0 up to date, 1 it cannot be, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m deploy.install", description=__doc__)
    parser.add_argument("extras", nargs="+", metavar="EXTRA", help="an extra of pyproject.toml")
    parser.add_argument("--remake", action="store_true", help="replace an environment of another Python")
    options = parser.parse_args()
    venv = Path(os.environ.get("VENV") or ".venv")
    torch = os.environ.get("TORCH") or "torch==2.13.0"
    try:
        install(ROOT, venv.absolute(), torch, options.extras, remake=options.remake)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
