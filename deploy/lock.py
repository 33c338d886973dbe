"""`python -m deploy.lock`: resolve what the images install once, and write it to deploy/docker/lock.txt.

One file for every image: kvstore takes a part of it, a decoder for CPUs and one for GPUs the same versions.
Knows pyproject.toml and uv, which does the resolving; asks a package index, so it needs a network.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.docker.requirements import extras_of, requirements

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "deploy/docker/lock.txt"
TORCH = "torch==2.13.0"
"""As the commands pin it. Its builds, for CPUs or a CUDA, are one version to pip, so one line serves all."""
IMAGE_EXTRAS = ("decoder", "gpu", "ucx", "events")


def inputs(root: Path) -> list[str]:
    """Requirements that the lock answers, sorted, one a line of a requirements file."""
    project = root / "pyproject.toml"
    wanted = {TORCH, *requirements(project, ["build", *IMAGE_EXTRAS])}
    unknown = {*IMAGE_EXTRAS} - {*extras_of(project)}
    if unknown:
        raise ValueError(f"pyproject.toml has no extra {', '.join(sorted(unknown))}")
    return sorted(wanted)


def digest_line(lines: list[str]) -> str:
    """The lock's line that says what it was resolved from."""
    return f"# of {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"


def main() -> int:
    """Exit status: 0 written, else uv's."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    if uv is None:
        print("error: no uv beside this Python; `make lock` installs it", file=sys.stderr)
        return 1
    wanted = inputs(ROOT)
    command = [uv, "pip", "compile", "-", "--universal", "--python-version", "3.11", "--upgrade"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
    answer = subprocess.run(
        command, cwd=ROOT, input="\n".join(wanted), text=True, stdout=subprocess.PIPE, check=False
    )
    if answer.returncode == 0:
        head = "# What the images install, resolved for Linux and Python 3.11 to 3.13; written by `make lock`"
        LOCK.write_text(f"{head}\n{digest_line(wanted)}\n{_for_linux(answer.stdout)}")
        print(f"{LOCK}: {len(answer.stdout.splitlines())} packages")
    return answer.returncode


def _for_linux(resolved: str) -> str:
    """Without the condition that every line has, as pyproject.toml names no other system to uv."""
    return resolved.replace(" ; sys_platform == 'linux'", "").replace(" and sys_platform == 'linux'", "")


if __name__ == "__main__":
    sys.exit(main())
