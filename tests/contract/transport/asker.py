"""A requester in a process of its own, on another host if need be, told by lines: connect, ask, close."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, Self

from services.contract.transport.faults import TransportFault
from services.contract.transport.protocol import Requester
from tests.contract.transport.peer import ROOT, connect, environment
from tests.contract.transport.slices import MEMORY_BYTES, Slices, expected, question
from tests.two_hosts import Host

LARGE = [(1, MEMORY_BYTES - 1)]


class Asker:
    """Use as a context manager, which ends the process."""

    def __init__(self, transport: str, address: bytes, host: Host) -> None:
        command = [*host.before, sys.executable, "-m", "tests.contract.transport.asker"]
        self.process = subprocess.Popen(
            [*command, transport, address.hex(), host.device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def begin(self, command: str) -> None:
        """Have it do something."""
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)

    def end(self) -> str:
        """Wait for what became of it: "" if all was right, or the fault."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the asker ended with {self.process.poll()}"
        fault: str = json.loads(line)
        return fault

    def do(self, command: str) -> str:
        self.begin(command)
        return self.end()


def main() -> None:
    transport, address, device = sys.argv[1:]
    source = Slices().memory
    requester: Requester | None = None

    def run(name: str, seconds: float) -> None:
        nonlocal requester
        if name == "connect":
            requester = connect(transport, bytes.fromhex(address), seconds=seconds, device=device)
            return
        assert requester is not None
        if name == "close":
            requester.close()
            return
        with requester.wait(requester.submit(question(LARGE), MEMORY_BYTES, seconds)) as payload:
            assert payload == expected(LARGE, source), "wrong bytes"

    for line in sys.stdin:
        name, seconds = line.split()
        start, fault = time.monotonic(), ""
        try:
            run(name, float(seconds))
        except TransportFault as error:
            fault = error.fault.value
        answer: Any = fault if time.monotonic() - start < float(seconds) + 1.5 else "too late"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
