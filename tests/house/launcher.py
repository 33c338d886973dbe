"""A running `hotset serve` for tests: its output as it comes, and proof that nothing stays behind.

Knows the launcher's command; the services it starts are found from `cwd`, the launcher itself is not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
HOTSET = (sys.executable, "-P", "-m", "services.command", "serve")
"""-P: the launcher's own module is the project's, whatever `services` lies in the directory."""


class Launcher:
    """The process, in a session of its own as a terminal would have it. Use as a context."""

    def __init__(
        self,
        cwd: Path,
        variables: Mapping[str, str],
        command: Sequence[str] = HOTSET,
        output: int | None = None,
        *,
        flags: Sequence[str] = (),
    ) -> None:
        """`flags` follow the command; `output`: a descriptor that takes the output instead of `lines`."""
        reader, writer = os.pipe() if output is None else (-1, output)
        self.process = subprocess.Popen(
            [*command, *flags],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(reader,), daemon=True)
        if output is None:
            os.close(writer)
            self._reader.start()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:  # the test failed: let it clean up, then insist
            self.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        if self.process.poll() is None:
            for process in [*self.descendants(), psutil.Process(self.process.pid)]:
                process.kill()
        self.process.wait()
        self._join(5)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, part: str, seconds: float = 30.0) -> str:
        """The first line that holds `part`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = next((line for line in self.lines if part in line), None)
            if found is not None:
                return found
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"no line with {part!r} in:\n{self.output}")

    def descendants(self) -> list[psutil.Process]:
        """Its living children, and theirs."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the terminal's whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def finish(self, seconds: float = 30.0) -> int:
        """Wait for its end; the exit status, with all output read."""
        status = self.process.wait(seconds)
        self._join(seconds)
        return status

    def _join(self, seconds: float) -> None:
        if self._reader.is_alive():
            self._reader.join(seconds)

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))


def wait_until_gone(processes: Sequence[psutil.Process], seconds: float = 15.0) -> None:
    """Fails if one of them is still there when time is up."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive, alive
