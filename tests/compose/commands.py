"""Other programs, run to their end: silent when they succeed, with all they said when they do not."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class CommandFailed(Exception):
    """A program ended with a status other than 0, or not in time; the message has what it said."""


def run(
    command: Sequence[str | Path],
    *,
    seconds: float = 600,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """What the program wrote, both streams together.

    Raises:
        CommandFailed: see there.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=seconds,
            cwd=cwd,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (
            error.output if isinstance(error.output, str) else (error.output or b"").decode(errors="replace")
        )
        raise CommandFailed(f"{' '.join(words)}: not done after {seconds:.0f} s\n{said}") from error
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(words)}: status {done.returncode}\n{done.stdout}")
    return done.stdout
