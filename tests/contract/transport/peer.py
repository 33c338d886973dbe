"""A responder in a process of its own, told what to do by lines: counters, forget (the session), end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from services.contract.transport.counters import TransportCounters
from services.contract.transport.frame import Credentials
from services.contract.transport.nixl_memory import NixlMemory
from services.contract.transport.nixl_requester import NixlRequester
from services.contract.transport.nixl_responder import NixlResponder
from services.contract.transport.protocol import Requester
from services.contract.transport.tcp_requester import TcpRequester
from services.contract.transport.tcp_responder import TcpResponder
from services.contract.transport.ucx_requester import UcxRequester
from services.contract.transport.ucx_responder import UcxResponder
from services.contract.transport.ucx_worker import UcxOptions
from tests.contract.transport.child import Child
from tests.contract.transport.proxy import Proxy
from tests.contract.transport.slices import CREDENTIALS, FarSlices, Slices
from tests.two_hosts import Host

OPTIONS = {
    "tcp": None,
    "ucx-shm": UcxOptions(tls="sm,self", lanes="shm"),
    "ucx-tcp": UcxOptions(tls="tcp,self", lanes="tcp"),
}
"""Transport -> how UCX is set up for it."""
REMOTE = tuple(OPTIONS)
NIXL = {
    "nixl-shm": UcxOptions(tls="sm,self", lanes="shm"),
    "nixl-tcp": UcxOptions(tls="tcp,sm,self", lanes="tcp"),
}
"""The same where nobody answers, so that what a responder refuses is not refused."""


class Peer(Child):
    """Answers until it is ended."""

    def __init__(self, transport: str, *, stall: float = 10.0, host: Host | None = None) -> None:
        """On this host, or in another namespace, where it listens on the cable."""
        self.transport = transport
        listen, device = (f"{host.address}:0", host.device) if host else ("127.0.0.1:0", "lo")
        before = host.before if host else ()
        super().__init__(before, "tests.contract.transport.peer", transport, str(stall), listen, device)
        self.address = bytes.fromhex(self.line())

    def tell(self, command: str) -> dict[str, Any]:
        """Have it do something; what it counts then."""
        self.say(command)
        answer: dict[str, Any] = json.loads(self.line())
        return answer

    def rest(self) -> dict[str, Any]:
        """Wait until no answer is under way, however it ended; what it counts then."""
        deadline = time.monotonic() + 10
        while (counted := self.tell("counters"))["held"]:
            assert time.monotonic() < deadline, "answers stay that nobody takes any more"
            time.sleep(0.02)
        return counted

    def processes(self) -> list[psutil.Process]:
        """This one, and what it started to do the work."""
        parent = psutil.Process(self.process.pid)
        return [*parent.children(), parent]

    def signal(self, number: signal.Signals) -> None:
        """To all of it."""
        for process in self.processes():
            process.send_signal(number)

    def requester(
        self,
        counters: TransportCounters | None = None,
        credentials: Credentials = CREDENTIALS,
        seconds: float = 10.0,
    ) -> Requester:
        if self.transport in NIXL:  # whose address changes with the process behind it
            deadline = time.monotonic() + 60
            while not (told := self.tell("counters")["address"]):
                assert time.monotonic() < deadline, "nobody offers the memory any more"
                time.sleep(0.02)
            return Proxy(NIXL[self.transport], bytes.fromhex(told))
        return connect(self.transport, self.address, counters, credentials, seconds)


def connect(
    transport: str,
    address: bytes,
    counters: TransportCounters | None = None,
    credentials: Credentials = CREDENTIALS,
    seconds: float = 10.0,
    device: str = "lo",
) -> Requester:
    counts = counters or TransportCounters()
    options = options_of(transport, device)
    if transport in NIXL:
        assert options is not None
        memory = NixlMemory(address, options)
        return NixlRequester(memory, FarSlices(memory), counts)
    if options is None:
        return TcpRequester(address, credentials, counts, seconds)
    return UcxRequester(address, credentials, counts, seconds, options)


def options_of(transport: str, device: str) -> UcxOptions | None:
    """How UCX is to be set up to listen on `device`; None where it is not UCX."""
    options = (OPTIONS | NIXL)[transport]
    return None if options is None else replace(options, devices=device)


def main() -> None:
    transport, stall, listen, device = sys.argv[1:]
    counters, service = TransportCounters(), Slices()
    options = options_of(transport, device)
    responder: TcpResponder | UcxResponder | NixlResponder
    if transport in NIXL:
        assert options is not None
        file = os.memfd_create("slices")
        os.write(file, service.memory)
        responder = NixlResponder(options, Path(f"/proc/{os.getpid()}/fd/{file}"), counters)
    elif options is None:
        responder = TcpResponder(listen.encode(), service, counters, float(stall))
    else:
        responder = UcxResponder(options, service, counters, float(stall))
    print(responder.address.hex(), flush=True)
    for line in sys.stdin:
        if line.strip() == "forget":
            service.grants.clear()
        elif line.strip() == "end":
            responder.close()
        faults = {fault.value: count for fault, count in counters.faults.items()}
        counted = {"requests": counters.requests, "sent": counters.sent_bytes, "held": responder.held_bytes}
        print(json.dumps(counted | faults | {"address": responder.address.hex()}), flush=True)


if __name__ == "__main__":
    main()
