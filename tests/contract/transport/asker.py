"""A requester in a process of its own, on another host if need be, told by lines: connect, ask, close."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from services.contract.transport.faults import TransportFault
from services.contract.transport.protocol import Requester
from tests.contract.transport.child import Child
from tests.contract.transport.peer import connect
from tests.contract.transport.slices import MEMORY_BYTES, Slices, expected, question
from tests.two_hosts import Host

LARGE = [(1, MEMORY_BYTES - 1)]


class Asker(Child):
    """Told to connect, ask and close."""

    def __init__(self, transport: str, address: bytes, host: Host) -> None:
        module = "tests.contract.transport.asker"
        super().__init__(host.before, module, transport, address.hex(), host.device)

    def end(self) -> str:
        """Wait for what became of it: "" if all was right, or the fault."""
        fault: str = json.loads(self.line())
        return fault

    def do(self, command: str) -> str:
        """Have it done, and wait."""
        self.say(command)
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
