"""The children together: wait for something while their output flows, notice a death, stop all in order.

Knows signals and pipes, not what the services are. One thread; nothing else may wait for the children.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from services.command.serve.child import Child
from services.command.serve.console import Console
from services.command.serve.probe import StartTold
from services.contract.progress import Progress

TICK_SECONDS = 0.1
STOP_SECONDS = 15.0  # a service promises 10
REMIND_SECONDS = 10.0
ASK_SECONDS = 0.5


class Failure(Exception):
    """It cannot go on; the message says why, for people."""


class Stopped(Exception):
    """Someone asked us to stop: Ctrl-C, SIGTERM, or the terminal went away."""


class Family:
    """Children in the order of their start. Use as a context: at its end all of them are gone."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._stop_requests = 0

    def __enter__(self) -> Family:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        while self._children:
            self._stop(self._children[-1])
        self._selector.close()

    def start(self, name: str, command: Sequence[str], *, own_errors: bool = False) -> Child:
        """Start a child that is to live until the end; `own_errors` as Child takes it.

        Raises:
            OSError: the program cannot be started.
        """
        child = Child(name, command, self._console, own_errors=own_errors)
        self._children.append(child)
        self._selector.register(child.pipe, selectors.EVENT_READ, child)
        return child

    def run(self, name: str, command: Sequence[str], seconds: float) -> str:
        """Run a child to its end; the last line it wrote. In a terminal it draws its own bars.

        Raises:
            Failure: it failed, another child ended, or time is up.
            Stopped: a signal came.
        """
        child = self.start(name, command, own_errors=sys.stderr.isatty())
        self.wait(name, lambda: child.exit_status == 0, seconds)
        self._stop(child)
        return child.tail[-1] if child.tail else ""

    def wait(
        self,
        what: str,
        ready: Callable[[], bool],
        seconds: float,
        told: Callable[[], StartTold] | None = None,
    ) -> None:
        """Wait until `ready`, while every child lives.

        Args:
            what: what is waited for, for people.
            ready: asked ten times a second; quick.
            seconds: the most to wait.
            told: how far it is; shown in a terminal as it goes, elsewhere with the reminders.

        Raises:
            Failure: a child ended, or time is up.
            Stopped: a signal came.
        """
        start = reminded = asked = time.monotonic()
        now_told = StartTold()
        bar = Progress(what, 0, stream=sys.stdout) if told and sys.stdout.isatty() else None
        with bar or contextlib.nullcontext():
            while not ready():
                self._turn()
                now = time.monotonic()
                if self._stop_requests:
                    raise Stopped
                for child in self._children:
                    if child.exit_status is not None and not ready():
                        raise Failure(self._obituary(child))
                if now - start > seconds:
                    raise Failure(f"{what}: not there after {seconds:.0f} s")
                if told and now - asked > ASK_SECONDS:
                    asked, now_told = now, told()
                    if bar:
                        bar.at(now_told.done_bytes, now_told.detail, now_told.total_bytes)
                if not bar and now - reminded > REMIND_SECONDS and seconds < float("inf"):
                    reminded = now
                    self._console.say(f"still waiting for {what} ({now - start:.0f} s){now_told}")

    def _turn(self) -> None:
        """Pass on what the children write during one tick."""
        end = time.monotonic() + TICK_SECONDS
        while (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if not key.data.pump():
                    self._selector.unregister(key.fd)

    def _stop(self, child: Child) -> None:
        """Ask, wait, insist; a second signal means at once. Its last lines are passed on."""
        asked = self._stop_requests
        deadline = time.monotonic() + STOP_SECONDS
        child.terminate()
        while (
            child.exit_status is None and time.monotonic() < deadline and self._stop_requests <= max(asked, 1)
        ):
            self._turn()
        if child.exit_status is None:
            self._console.say(f"{child.name} did not stop; killing it")
        child.kill()
        child.pump()
        self._children.remove(child)
        if child.pipe in self._selector.get_map():
            self._selector.unregister(child.pipe)
        child.close()

    def _obituary(self, child: Child) -> str:
        child.pump()
        status = child.exit_status or 0
        end = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        tail = "\n".join(f"    {line}" for line in child.tail) or "    (it wrote nothing)"
        return f"{child.name} {end}; its last lines:\n{tail}"

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_requests += 1
