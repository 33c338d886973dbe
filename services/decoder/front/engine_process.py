"""One life of an engine process: start it tied to this one, pass its log on, end it.

Knows nothing of what the engine says on its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

TERM_SECONDS = 3.0
_LAST_LINE_SECONDS = 1.0
_ERROR = "error: "
_LAST_LINES = 20
_LONGEST_LINE_BYTES = 64 * 2**10


class EngineProcess:
    """A started engine. It dies with this process (tether.py) and has its own process group, so that
    Ctrl-C in a terminal reaches the front alone, which ends it in order.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._forwarding = asyncio.get_running_loop().create_task(self._forward())

    @classmethod
    async def start(cls, command: Sequence[str]) -> EngineProcess:
        """Start `command`.

        Args:
            command: absolute path of the program, and its arguments.
        """
        tether = str(Path(__file__).with_name("tether.py"))
        process = await asyncio.create_subprocess_exec(
            # -S: the tie needs the standard library alone, and starts in 15 ms.
            *(sys.executable, "-S", tether, str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id, which is its process group's too."""
        return self._process.pid

    async def wait(self) -> int:
        """Until it has ended and its last line was passed on; its exit status, -N for signal N."""
        status = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            # A grandchild may hold the pipe open; its lines are not worth waiting for.
            async with asyncio.timeout(_LAST_LINE_SECONDS):
                await asyncio.shield(self._forwarding)
        return status

    def last_error(self) -> str:
        """What its last `error:` line said, and the lines after it; empty if it wrote none.

        Other lines stay in the log: this text is shown to clients.
        """
        lines = list(self._lines)
        starts = [place for place, line in enumerate(lines) if line.startswith(_ERROR)]
        return "\n".join(lines[starts[-1] :]).removeprefix(_ERROR) if starts else ""

    def kill(self) -> None:
        """SIGKILL it and what it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and after TERM_SECONDS SIGKILL; returns when it is gone."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(TERM_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
        await self.wait()
        self._forwarding.cancel()

    async def _forward(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        rest = b""
        while piece := await stream.read(_LONGEST_LINE_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > _LONGEST_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._pass_on(line)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self._lines.append(text)
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
