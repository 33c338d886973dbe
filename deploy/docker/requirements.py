"""`python3 requirements.py EXTRA ...`: what pip is to install for these extras, one requirement a line.

Reads the pyproject.toml of the working directory. "build" stands for what builds the wheel; the project's own
dependencies are printed in every other case. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

BUILD = "build"


def extras_of(project: Path) -> list[str]:
    """The extras that a pyproject.toml declares."""
    return list(tomllib.loads(project.read_text())["project"]["optional-dependencies"])


def requirements(project: Path, extras: Sequence[str]) -> list[str]:
    """Requirements of `extras`, sorted, without doubles.

    Raises:
        KeyError: an extra that the file does not declare.
    """
    loaded = tomllib.loads(project.read_text())
    wanted: set[str] = set()
    if list(extras) != [BUILD]:
        wanted.update(loaded["project"]["dependencies"])
    for extra in extras:
        optional = loaded["project"]["optional-dependencies"]
        wanted.update(loaded["build-system"]["requires"] if extra == BUILD else optional[extra])
    return sorted(wanted)


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
