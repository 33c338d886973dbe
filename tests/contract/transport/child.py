"""A process of these tests that is told and answers by lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[3]


class Child:
    """Use as a context manager, which ends the process."""

    def __init__(self, before: Sequence[str], module: str, *arguments: str) -> None:
        """Run `module` with its arguments, behind a command that leads into another namespace, if any."""
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def say(self, line: str) -> None:
        """One line to it."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def line(self) -> str:
        """The next line from it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"{self.process.args!r} ended with {self.process.poll()}"
        return line.strip()
