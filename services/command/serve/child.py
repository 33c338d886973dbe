"""One child process: its output goes on line by line behind its name, and its last lines are kept.

Knows nothing of what the child does. Each child leads a process group of its own, so that a Ctrl-C in
the terminal reaches only the parent, which then stops the children in the right order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections import deque
from collections.abc import Sequence

from services.command.serve.console import Console

TAIL_LINES = 20
_PR_SET_PDEATHSIG = 1  # prctl(2)


class Child:
    """A started process. Call `pump` whenever its pipe is readable; `lines` is for whoever waits for one."""

    def __init__(
        self, name: str, command: Sequence[str], console: Console, *, own_errors: bool = False
    ) -> None:
        """Start it.

        Args:
            name: put before its lines.
            command: program and arguments.
            console: takes its lines.
            own_errors: its standard error is ours, so that it draws its bars there itself.

        Raises:
            OSError: the program cannot be started.
        """
        self.name = name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._console = console
        self._rest = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if own_errors else subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            preexec_fn=_end_with_parent,  # safe: this program has one thread
        )
        assert self._process.stdout is not None
        self.pipe = self._process.stdout.fileno()
        os.set_blocking(self.pipe, False)

    @property
    def exit_status(self) -> int | None:
        """Status of the ended process, negative for a signal; None while it runs."""
        return self._process.poll()

    def pump(self) -> bool:
        """Pass on what the child wrote; False once its output has ended."""
        while True:
            try:
                chunk = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                return True
            if not chunk:
                if self._rest:
                    self._line(self._rest)
                    self._rest = b""
                return False
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            for line in whole:
                self._line(line)

    def terminate(self) -> None:
        """Ask it to end; it may take its time."""
        if self.exit_status is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it now, with whatever is left of its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Let go of the pipe, after its last line."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self.tail.append(text)
        self._console.line(f"{self.name:<8}| {text}")


def _end_with_parent() -> None:
    """In the child: a SIGTERM when the parent dies, however it dies (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
