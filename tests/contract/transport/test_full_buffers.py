"""Long questions and long answers over sockets that hold little: nobody may wait for who waits for him."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from services.contract.transport.counters import TransportCounters
from services.contract.transport.ledger import IN_FLIGHT
from services.contract.transport.tcp_requester import TcpRequester
from services.contract.transport.tcp_responder import TcpResponder
from tests.contract.transport.slices import CREDENTIALS, Slices, expected, question

BUFFER_BYTES = 16 * 1024
PIECES = [(n * 64, 460) for n in range(9000)]  # asked for in 72 KB, answered with 4 MB
SECONDS = 60.0


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback's own are so large that they hide it; those of a listening socket are its connections'."""
    connect = socket.create_connection

    def small(*arguments: object, **more: object) -> socket.socket:
        made = connect(*arguments, **more)  # type: ignore[arg-type]  # as they came
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        return made

    monkeypatch.setattr(socket, "create_connection", small)


@pytest.mark.usefixtures("small_buffers")
def test_all_credits_are_used_at_once() -> None:
    service = Slices()
    with closing(TcpResponder(b"127.0.0.1:0", service, TransportCounters())) as responder:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            responder._listening.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        counters = TransportCounters()
        with closing(TcpRequester(responder.address, CREDENTIALS, counters, SECONDS)) as requester:
            size = sum(length for _, length in PIECES)
            tickets = [requester.submit(question(PIECES), size, SECONDS) for _ in range(IN_FLIGHT)]
            for ticket in tickets:
                with requester.wait(ticket) as payload:
                    assert payload == expected(PIECES, service.memory)
    assert not any(counters.faults.values())
