"""A peer that is killed, stopped, restarted or forgets us, before, in and between requests.

Each time: right bytes or a clear error within the deadline, and a new requester goes on without a restart.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.contract.errors import HotsetError
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.protocol import Requester
from tests.contract.transport.peer import NIXL, Peer, connect
from tests.contract.transport.proxy import Proxy
from tests.contract.transport.slices import MEMORY_BYTES, Slices, expected, question
from tests.nixl import over

ASKED = over(["tcp", "ucx-shm"], ["ucx-tcp"])
MOST = [*ASKED, *over(["nixl-tcp"], ["nixl-shm"])]
SOME = [*ASKED, *over([], NIXL)]
LARGE = [(1, MEMORY_BYTES - 1)]
MOMENTS = [
    pytest.param("before", marks=pytest.mark.slow),
    "during",
    pytest.param("between", marks=pytest.mark.slow),
]
SECONDS = 1.5


@pytest.fixture(scope="module")
def source() -> memoryview:
    return Slices().memory


def ask(requester: Requester, source: memoryview, seconds: float = SECONDS) -> None:
    """Right bytes, or an error."""
    ticket = requester.submit(question(LARGE), MEMORY_BYTES, seconds)
    with requester.wait(ticket) as payload:
        assert payload == expected(LARGE, source)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def struck(
    peer: Peer, requester: Requester, source: memoryview, moment: str, strike: Callable[[], None]
) -> None:
    """Have `strike` happen at that moment of asking and wait for what becomes of the requests."""
    if moment == "before":
        strike()
    elif moment == "between":
        ask(requester, source, 20.0)
        strike()
    tickets = []
    start = time.monotonic()
    try:
        for number in range(requester.capabilities.in_flight):
            tickets.append(requester.submit(question(LARGE), MEMORY_BYTES, SECONDS))
            if moment == "during" and not number:
                strike()
        for ticket in tickets:
            with requester.wait(ticket) as payload:
                assert payload == expected(LARGE, source)
    except TransportFault as error:
        if error.fault not in (Fault.DEADLINE, Fault.LOST):
            raise
    assert time.monotonic() - start < SECONDS + 1.0


def go_on(peer: Peer, source: memoryview) -> None:
    """The next requester has what it asks for; over nixl, once a process that did not survive has another."""
    deadline = time.monotonic() + 60
    while True:
        try:
            requester = peer.requester()
            ask(requester, source, 20.0)
            return requester.close()
        except TransportFault:
            assert peer.transport in NIXL, "who was stopped goes on"
            assert time.monotonic() < deadline, "it does not come back"


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("transport", MOST)
def test_a_killed_peer(transport: str, moment: str, source: memoryview) -> None:
    before = descriptors()
    with Peer(transport) as peer:
        requester = peer.requester()

        def kill() -> None:
            peer.signal(signal.SIGKILL)
            peer.process.wait()

        struck(peer, requester, source, moment, kill)
        with pytest.raises(TransportFault):
            ask(requester, source)
        requester.close()
    with Peer(transport) as again:
        requester = again.requester()
        ask(requester, source, 20.0)
        requester.close()
    assert descriptors() <= before


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("transport", MOST)
def test_a_stopped_peer_that_goes_on(transport: str, moment: str, source: memoryview) -> None:
    with Peer(transport, stall=1.0) as peer:
        requester = peer.requester()
        struck(peer, requester, source, moment, lambda: peer.signal(signal.SIGSTOP))
        requester.close()  # must not wait for it
        peer.signal(signal.SIGCONT)
        go_on(peer, source)
        peer.rest()


@pytest.mark.parametrize("transport", ASKED)
def test_a_requester_that_stops_is_let_go_and_others_are_served(transport: str, source: memoryview) -> None:
    """It asks for much and takes nothing: its answers must not stay, nor anybody wait for it."""
    with Peer(transport, stall=1.0) as peer:
        idle, other = peer.requester(), peer.requester()
        for _ in range(idle.capabilities.in_flight):
            idle.submit(question(LARGE), MEMORY_BYTES, 60.0)
        for _ in range(3):
            ask(other, source, 20.0)
        peer.rest()
        ask(other, source, 20.0)
        other.close()
        idle.close()


@pytest.mark.parametrize("transport", ASKED)
def test_a_session_that_ended_reads_nothing_more(transport: str, source: memoryview) -> None:
    with Peer(transport) as peer:
        requester = peer.requester()
        ask(requester, source, 20.0)
        peer.tell("forget")
        with pytest.raises(HotsetError):
            ask(requester, source)
        requester.close()
        with pytest.raises(HotsetError):
            ask(peer.requester(seconds=0.5), source)


@pytest.mark.parametrize("transport", SOME)
def test_an_address_of_an_earlier_life_leads_nowhere(transport: str) -> None:
    with Peer(transport) as peer:
        address = peer.address
        peer.signal(signal.SIGKILL)
    if transport in NIXL:
        with pytest.raises(TransportFault):
            Proxy(NIXL[transport], address)
        return
    start = time.monotonic()
    with pytest.raises(TransportFault):
        connect(transport, address, seconds=1.0)
    assert time.monotonic() - start < 3.0


@pytest.mark.parametrize("transport", MOST)
def test_an_idle_responder_sleeps(transport: str, source: memoryview) -> None:
    with Peer(transport) as peer:
        requester = peer.requester()
        ask(requester, source, 20.0)

        def busy() -> float:
            times = [process.cpu_times() for process in peer.processes()]
            return sum(time.user + time.system for time in times)

        time.sleep(0.3)  # the answer is over, its spinning too
        start = busy()
        time.sleep(2.0)  # what is measured: an idle while
        assert round(busy() - start, 2) <= 0.02  # seconds, told in hundredths
        requester.close()


@pytest.mark.parametrize("transport", SOME)
def test_the_end_of_a_responder_leaves_no_thread(transport: str) -> None:
    with Peer(transport) as peer:
        tasks = Path(f"/proc/{peer.process.pid}/task")

        def named() -> list[str]:
            return [(task / "comm").read_text().strip() for task in tasks.iterdir()]

        before = len(named())
        assert peer.tell("end")["held"] == 0
        assert len(named()) < before
    assert threading.active_count() < 50
