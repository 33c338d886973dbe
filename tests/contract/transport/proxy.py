"""A requester over nixl in a process of its own, because the test's has loaded ucxx's UCX; told by lines."""

from __future__ import annotations

import pickle
import sys
from typing import Any

from services.contract.errors import HotsetError
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.nixl_memory import NixlMemory
from services.contract.transport.nixl_requester import NixlRequester
from services.contract.transport.protocol import Reply, Ticket
from services.contract.transport.ucx_worker import UcxOptions
from tests.contract.transport.child import Child
from tests.contract.transport.slices import FarSlices


class Proxy(Child):
    """A Requester; see protocol.py. Closing it ends the process."""

    capabilities = NixlRequester.capabilities

    def __init__(self, options: UcxOptions, address: bytes) -> None:
        told = (options.tls, options.devices, options.lanes, address.hex())
        super().__init__((), "tests.contract.transport.proxy", *told)
        self.closed = False
        try:
            self.lanes: tuple[str, ...] = self._heard()
        except BaseException:
            self.__exit__()
            raise

    def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
        ticket: Ticket = self._do("submit", body, reply_bytes, seconds)
        return ticket

    def wait(self, ticket: Ticket) -> Reply:
        return Reply(memoryview(self._do("wait", ticket)), lambda: None)

    def counted(self) -> TransportCounters:
        counters: TransportCounters = self._do("counted")
        return counters

    def close(self) -> None:
        """Have it close, in good order, and end."""
        if self.closed:
            return
        self.closed = True
        if self.process.poll() is None:
            self._do("close")
        self.__exit__()

    def _do(self, *what: Any) -> Any:
        if self.closed and what[0] != "close":
            raise TransportFault(Fault.LOST, "the process is gone")
        self.say(pickle.dumps(what).hex())
        return self._heard()

    def _heard(self) -> Any:
        kind, value = pickle.loads(bytes.fromhex(self.line()))
        if kind is TransportFault:
            raise TransportFault(*value)
        if kind is not None:
            raise kind(value)
        return value


def main() -> None:
    tls, devices, lanes, address = sys.argv[1:]
    counters = TransportCounters()
    requester: NixlRequester | None = None

    def did(what: tuple[Any, ...]) -> Any:
        assert requester is not None
        if what[0] == "counted":
            return counters
        if what[0] != "wait":
            return getattr(requester, what[0])(*what[1:])
        with requester.wait(what[1]) as payload:
            return bytes(payload)

    def tell(kind: type[HotsetError] | None, value: Any) -> None:
        print(pickle.dumps((kind, value)).hex(), flush=True)

    try:
        memory = NixlMemory(bytes.fromhex(address), UcxOptions(tls=tls, devices=devices, lanes=lanes))
        requester = NixlRequester(memory, FarSlices(memory), counters)
        tell(None, requester.lanes)
    except TransportFault as error:
        tell(TransportFault, (error.fault, str(error)))
    for line in sys.stdin:
        try:
            tell(None, did(pickle.loads(bytes.fromhex(line))))
        except TransportFault as error:
            tell(TransportFault, (error.fault, str(error)))
        except HotsetError as error:
            tell(type(error), str(error))


if __name__ == "__main__":
    main()
