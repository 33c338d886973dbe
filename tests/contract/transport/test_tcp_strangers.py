"""Who keeps a connection over plain sockets without asking anything: nobody is locked out by that."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.contract.transport.checksum import load_checksum
from services.contract.transport.frame import FRAME_BYTES, MAX_REQUEST_BYTES, Frame, Kind, write_frame
from services.contract.transport.tcp_address import parse_address
from tests.contract.transport.peer import Peer
from tests.contract.transport.slices import GENERATION, KEY, SESSION, question

PATIENCE_SECONDS = 60.0


def header(session: int) -> bytes:
    """Of the longest request there is."""
    message = bytearray(FRAME_BYTES + MAX_REQUEST_BYTES)
    frame = Frame(Kind.REQUEST, session, GENERATION, 10, 1, MAX_REQUEST_BYTES, KEY)
    write_frame(frame, memoryview(message), load_checksum())
    return bytes(message[:FRAME_BYTES])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def connected(stack: ExitStack, peer: Peer) -> socket.socket:
    address = parse_address(peer.address)
    return stack.enter_context(socket.create_connection(address, timeout=PATIENCE_SECONDS))


def test_a_stranger_goes_with_its_header(stack: ExitStack) -> None:
    peer = stack.enter_context(Peer("tcp", stall=600.0))
    connection = connected(stack, peer)
    connection.sendall(header(SESSION + 1))
    assert connection.recv(1) == b""
    assert peer.tell("counters")["session"] == 1


def test_a_request_has_a_time_in_all(stack: ExitStack) -> None:
    """A byte now and then is not enough, even of a client."""
    peer = stack.enter_context(Peer("tcp", stall=1.0))
    connection = connected(stack, peer)
    connection.sendall(header(SESSION))
    connection.settimeout(0.2)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            connection.sendall(b"x")
            if connection.recv(1) == b"":
                return
        except TimeoutError:
            continue
        except OSError:
            return
    raise AssertionError("it may go on for ever")


def test_a_responder_without_descriptors_sleeps_and_accepts_later(stack: ExitStack) -> None:
    peer = stack.enter_context(Peer("tcp"))
    process = peer.process.pid

    def busy() -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    _, most = resource.prlimit(process, resource.RLIMIT_NOFILE)
    used = max(int(entry.name) for entry in Path(f"/proc/{process}/fd").iterdir()) + 1
    resource.prlimit(process, resource.RLIMIT_NOFILE, (used, most))
    free = set(range(used)) - {int(entry.name) for entry in Path(f"/proc/{process}/fd").iterdir()}
    waiting = [connected(stack, peer) for _ in range(len(free) + 1)]
    before = busy()
    time.sleep(2.0)  # what is measured: a while with somebody at the door
    assert busy() - before < 0.5
    resource.prlimit(process, resource.RLIMIT_NOFILE, (most, most))
    for connection in waiting:
        connection.close()
    requester = peer.requester(seconds=PATIENCE_SECONDS)
    with requester.wait(requester.submit(question([(5, 100)]), 100, PATIENCE_SECONDS)) as payload:
        assert len(payload) == 100
    requester.close()
