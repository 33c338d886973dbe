"""Nothing grows: memory, descriptors and threads stay what they are over many transfers and many clients."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from services.contract.transport.counters import TransportCounters
from services.contract.transport.mapped import MappedRequester
from services.contract.transport.protocol import Requester, Ticket
from tests.contract.transport.peer import REMOTE, Peer
from tests.contract.transport.slices import SESSION, Slices, question

MOST = ["tcp", "ucx-shm", pytest.param("ucx-tcp", marks=pytest.mark.slow)]
RECORDS = [(n * 4096, 1152) for n in range(32)]
ROOM = 32 * 1152
QUESTION = question(RECORDS)
SLACK_BYTES = 1 << 20  # what an allocator may keep, whatever we do


def fetch(requester: Requester, times: int) -> None:
    """Packed fetches, with credits in use."""
    tickets: list[Ticket] = []
    for _ in range(times):
        if len(tickets) == requester.capabilities.in_flight:
            requester.wait(tickets.pop(0)).release()
        tickets.append(requester.submit(QUESTION, ROOM, 30.0))
    for ticket in tickets:
        requester.wait(ticket).release()


def used(process: psutil.Process) -> tuple[int, int, int]:
    return process.memory_info().rss, process.num_fds(), process.num_threads()


def flat(peer: Peer, requester: Requester, times: int) -> None:
    fetch(requester, times // 10)
    ours, theirs = psutil.Process(), psutil.Process(peer.process.pid)
    before = [used(ours), used(theirs)]
    fetch(requester, times)
    for (rss, *others), (later, *others_later) in zip(before, [used(ours), used(theirs)], strict=True):
        assert later <= rss * 1.02 + SLACK_BYTES
        # Fewer is no leak: what an earlier test left for the collector may go between the two looks.
        grown = [now for now, then in zip(others_later, others, strict=True) if now > then]
        assert not grown, (others, others_later)
    peer.rest()


@pytest.mark.parametrize("transport", MOST)
def test_five_thousand_fetches(transport: str) -> None:
    with Peer(transport) as peer:
        requester = peer.requester()
        flat(peer, requester, 5000)
        requester.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", REMOTE)
def test_a_hundred_thousand_fetches(transport: str) -> None:
    with Peer(transport) as peer:
        requester = peer.requester()
        flat(peer, requester, 100_000)
        requester.close()


@pytest.mark.parametrize("transport", MOST)
def test_clients_that_come_and_go(transport: str) -> None:
    with Peer(transport) as peer:
        ours, theirs = psutil.Process(), psutil.Process(peer.process.pid)

        def round_of_clients() -> None:
            for _ in range(8):
                requester = peer.requester()
                fetch(requester, 3)
                requester.close()

        round_of_clients()
        peer.rest()
        before = [used(ours), used(theirs)]
        for _ in range(5):
            round_of_clients()
        peer.rest()
        for (rss, fds, _), (later, fds_later, _) in zip(before, [used(ours), used(theirs)], strict=True):
            assert later <= rss * 1.02 + 4 * SLACK_BYTES
            assert fds_later <= fds + 2  # a connection that has just ended


@pytest.mark.parametrize("transport", MOST)
def test_sixty_four_clients_at_once(transport: str) -> None:
    with Peer(transport) as peer:
        failed: list[BaseException] = []

        def client() -> None:
            try:
                requester = peer.requester(TransportCounters(), seconds=60.0)
                fetch(requester, 40)
                requester.close()
            except BaseException as error:  # noqa: BLE001  # told by the test's own thread
                failed.append(error)

        threads = [threading.Thread(target=client) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failed == []
        peer.rest()


def test_mapped_keeps_nothing() -> None:
    requester = MappedRequester(Slices(), SESSION, TransportCounters())
    fetch(requester, 100)
    assert requester._staging.taken_bytes == 0
    requester.close()
    assert Path("/proc/self/fd").exists()
