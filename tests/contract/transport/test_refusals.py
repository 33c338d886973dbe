"""What is wrong is refused, by kind, and counted at the end that saw it; and the next client is served."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from services.contract.errors import HotsetError
from services.contract.transport import ledger
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import FRAME_BYTES, Frame, Kind, write_frame
from services.contract.transport.protocol import Requester
from services.contract.transport.tcp_requester import TcpRequester
from tests.contract.transport.peer import REMOTE, Peer, connect
from tests.contract.transport.slices import CREDENTIALS, GENERATION, SESSION, question

WRONG = {
    Fault.SESSION: replace(CREDENTIALS, session=SESSION + 1),
    Fault.GENERATION: replace(CREDENTIALS, generation=GENERATION - 1),
    Fault.KEY: replace(CREDENTIALS, key=bytes(16)),
}


@pytest.fixture(scope="module", params=REMOTE)
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    with Peer(request.param) as started:
        yield started


def served(peer: Peer) -> bool:
    requester = peer.requester()
    with requester.wait(requester.submit(question([(5, 100)]), 100, 10.0)) as payload:
        size = len(payload)
    requester.close()
    return size == 100


@pytest.mark.parametrize("fault", WRONG, ids=[fault.value for fault in WRONG])
def test_a_stranger_is_refused_and_counted(peer: Peer, fault: Fault) -> None:
    before = peer.tell("counters")

    def ask() -> None:
        with closing(peer.requester(credentials=WRONG[fault], seconds=0.5)) as requester:
            requester.wait(requester.submit(question([(0, 10)]), 10, 1.0))

    with pytest.raises(HotsetError):
        ask()
    after = peer.rest()
    assert after[fault.value] == before[fault.value] + 1
    assert served(peer)


@pytest.mark.parametrize("fault", WRONG, ids=[fault.value for fault in WRONG])
def test_credentials_that_change_after_the_hello_are_refused(peer: Peer, fault: Fault) -> None:
    """A requester that says hello as one session cannot ask as another, nor with another key."""
    counters = TransportCounters()
    requester = peer.requester(counters)
    requester._ledger._credentials = WRONG[fault]  # type: ignore[attr-defined]  # to be wrong on purpose
    before = peer.tell("counters")
    with pytest.raises(TransportFault):
        requester.wait(requester.submit(question([(0, 10)]), 10, 5.0))
    requester.close()
    assert sum(peer.tell("counters")[kind.value] - before[kind.value] for kind in WRONG) == 1
    assert sum(counters.faults.values()) == 1
    assert served(peer)


def _shorter(message: bytearray) -> None:
    del message[-3:]


def _longer(message: bytearray) -> None:
    message += b"more"


def _flipped(message: bytearray) -> None:
    message[-1] ^= 1


def _no_frame(message: bytearray) -> None:
    message[:4] = b"HTTP"


@pytest.mark.parametrize(
    ("spoil", "kinds"),
    [
        (_shorter, (Fault.LENGTH,)),
        (_longer, (Fault.LENGTH,)),
        (_flipped, (Fault.CHECKSUM,)),
        (_no_frame, (Fault.LENGTH,)),
    ],
)
def test_a_spoiled_request_is_never_answered(
    peer: Peer, spoil: Callable[[bytearray], None], kinds: tuple[Fault, ...]
) -> None:
    requester = peer.requester()
    before = peer.tell("counters")
    ask = requester._ledger.ask  # type: ignore[attr-defined]  # to spoil what it makes

    def spoiled(*arguments: Any) -> Any:
        ticket, message = ask(*arguments)
        spoil(message)
        return ticket, message

    requester._ledger.ask = spoiled  # type: ignore[attr-defined]  # as above
    ticket = requester.submit(question([(0, 10)]), 10, 0.5)
    if spoil is _longer and peer.transport == "tcp":  # a stream has no ends: the rest begins the next frame
        with requester.wait(ticket):
            pass
        with pytest.raises(TransportFault):
            requester.wait(requester.submit(question([(0, 10)]), 10, 0.5))
    else:
        with pytest.raises(TransportFault):
            requester.wait(ticket)
    requester.close()
    after = peer.tell("counters")
    if spoil is not _shorter or peer.transport != "tcp":  # there the rest never comes, so nothing is seen
        assert sum(after[kind.value] - before[kind.value] for kind in kinds) >= 1
    assert served(peer)


def _answered(asked: Frame) -> Frame:
    return replace(asked, kind=Kind.REPLY, length=4)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (
            lambda asked: replace(_answered(asked), sequence=asked.sequence + 1),
            Fault.SEQUENCE,
        ),
        (lambda asked: replace(asked, kind=Kind.REQUEST, length=4), Fault.SEQUENCE),
        (lambda asked: replace(_answered(asked), session=SESSION + 1), Fault.SESSION),
        (lambda asked: replace(_answered(asked), generation=GENERATION + 1), Fault.GENERATION),
        (lambda asked: replace(_answered(asked), length=5000), Fault.LENGTH),
        (None, Fault.CHECKSUM),
    ],
    ids=["sequence", "kind", "session", "generation", "length", "checksum"],
)
def test_an_answer_to_something_else_is_refused(
    answer: Callable[[Frame], Frame] | None, fault: Fault
) -> None:
    """A peer that answers wrongly; the checks are the ledger's, which every transport uses."""
    counters = TransportCounters()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = "{}:{}".format(*listening.getsockname()).encode()
        requester = TcpRequester(address, CREDENTIALS, counters, 5.0)
        connection, _ = listening.accept()
        with connection:
            ticket = requester.submit(b"", 4, 5.0)
            connection.recv(FRAME_BYTES, socket.MSG_WAITALL)
            asked = Frame(Kind.REQUEST, SESSION, GENERATION, 4, ticket.sequence, 4)
            frame = (answer or _answered)(asked)
            message = bytearray(FRAME_BYTES + frame.length)
            write_frame(frame, memoryview(message), requester._ledger._checksum)
            message[-1] ^= answer is None
            connection.sendall(message)
            with pytest.raises(TransportFault) as caught:
                requester.wait(ticket)
    assert caught.value.fault is fault
    assert counters.faults[fault] == 1
    requester.close()


def test_what_ended_stays_ended_and_says_so(peer: Peer) -> None:
    requester: Requester = peer.requester()
    requester.close()
    requester.close()
    with pytest.raises(TransportFault):
        requester.submit(b"", 1, 1.0)


@pytest.mark.parametrize("transport", REMOTE)
def test_an_address_that_is_none_is_a_fault(transport: str) -> None:
    for address in (b"nonsense", b"127.0.0.1:1", b"\x00" * 40):
        with pytest.raises(TransportFault):
            connect(transport, address, seconds=0.5)


def test_credits_are_few() -> None:
    assert ledger.IN_FLIGHT <= 8
