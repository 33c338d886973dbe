"""A client's program, run to its end. Knows processes; nothing of clients."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

RUN_SECONDS = 900


def run(
    command: Sequence[str], variables: Mapping[str, str], directory: Path, said: str = "", status: int = 0
) -> str:
    """What it prints: on standard output, or on standard error if it is to fail.

    Args:
        command: the program and its arguments.
        variables: its environment.
        directory: where it runs.
        said: its standard input.
        status: how it is to exit.
    """
    done = subprocess.run(
        command,
        env=variables,
        cwd=directory,
        input=said,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stderr if status else done.stdout
