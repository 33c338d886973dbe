"""Answers over UCX that are not what they say: UCX passes them on without a word, and none is believed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from services.contract.transport.checksum import load_checksum
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import (
    FRAME_BYTES,
    MAX_REQUEST_BYTES,
    Frame,
    Kind,
    read_frame,
    write_frame,
)
from services.contract.transport.ucx_requester import UcxRequester
from services.contract.transport.ucx_tags import KIND_MASK, TO_RESPONDER, to_requester
from services.contract.transport.ucx_worker import UcxOptions, UcxWorker
from tests.contract.transport.slices import CREDENTIALS, GENERATION, SESSION

OPTIONS = UcxOptions(tls="sm,self")
ROOM = 5000
Spoil = Callable[[bytearray], bytearray]


def body(sequence: int) -> bytes:
    """Another one each time: what an earlier answer left in a buffer must not complete this one."""
    return bytes([sequence % 251]) * 4000


def answered(asked: Frame, content: bytes) -> bytearray:
    message = bytearray(FRAME_BYTES) + content
    frame = Frame(Kind.REPLY, SESSION, GENERATION, 0, asked.sequence, len(content))
    write_frame(frame, memoryview(message), load_checksum())
    return message


def lie(spoil: Spoil, address: list[bytes], ready: threading.Event, stop: threading.Event) -> None:
    """Welcome one requester and answer all it asks with spoiled messages."""
    worker = UcxWorker(OPTIONS)
    address.append(worker.address)
    ready.set()
    endpoint, kept = None, []
    while not stop.is_set():
        worker.progress()
        arrival = worker.arrived(TO_RESPONDER, KIND_MASK)
        if arrival is None:
            time.sleep(0.001)
            continue
        buffer = memoryview(bytearray(arrival.length))
        landing = worker.take(buffer, arrival)
        worker.run(lambda: bool(landing.completed), time.monotonic() + 5)  # noqa: B023  # run returns first
        asked = read_frame(buffer, MAX_REQUEST_BYTES)
        if asked.kind is Kind.HELLO:
            endpoint = worker.connect(bytes(buffer[FRAME_BYTES:]))
            message = answered(asked, b"")
        else:
            message = spoil(answered(asked, body(asked.sequence)))
        kept.append((message, worker.send(endpoint, message, to_requester(asked.sequence))))
    worker.disconnect(endpoint)
    worker.close()


@contextmanager
def liar(spoil: Spoil, counters: TransportCounters) -> Iterator[UcxRequester]:
    address: list[bytes] = []
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lie, args=(spoil, address, ready, stop))
    thread.start()
    assert ready.wait(30)
    requester = UcxRequester(address[0], CREDENTIALS, counters, 10.0, OPTIONS)
    try:
        yield requester
    finally:
        requester.close()
        stop.set()
        thread.join()


def _another(message: bytearray) -> bytearray:
    return answered(Frame(Kind.REPLY, 0, 0, 0, 12345, 0), bytes(message[FRAME_BYTES:]))


def _flipped(message: bytearray) -> bytearray:
    message[-1] ^= 1
    return message


CASES: dict[str, tuple[Spoil, tuple[Fault, ...]]] = {
    "shorter": (lambda message: message[:-3], (Fault.CHECKSUM,)),
    "no more than a header": (lambda message: message[:FRAME_BYTES], (Fault.CHECKSUM,)),
    "half a header": (lambda message: message[:20], (Fault.SEQUENCE, Fault.LENGTH, Fault.CHECKSUM)),
    "longer than the room": (lambda message: message + bytes(ROOM), (Fault.LENGTH,)),
    "another's": (_another, (Fault.SEQUENCE,)),
    "one bit": (_flipped, (Fault.CHECKSUM,)),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_it_is_believed(case: str) -> None:
    spoil, faults = CASES[case]
    counters, spoiling = TransportCounters(), threading.Event()

    def later(message: bytearray) -> bytearray:
        return spoil(message) if spoiling.is_set() else message

    with liar(later, counters) as requester:
        for _ in range(3):  # so that the buffer has held whole answers
            ticket = requester.submit(b"ask", ROOM, 5.0)
            with requester.wait(ticket) as payload:
                assert payload == body(ticket.sequence)
        spoiling.set()
        with pytest.raises(TransportFault) as caught:
            requester.wait(requester.submit(b"ask", ROOM, 5.0))
    assert caught.value.fault in faults
    assert sum(counters.faults.values()) == 1
