"""Frames: what is written is read, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contract.errors import HotsetError, NotFound, StaleReference
from services.contract.transport.checksum import load_checksum
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import FRAME_BYTES, Frame, Kind, check_body, read_frame, write_frame
from services.contract.transport.refusal import MAX_REFUSAL_BYTES, read_refusal, write_refusal

CHECKSUM = load_checksum()


def framed(body: bytes, **changes: int) -> memoryview:
    said = {"session": 7, "generation": 3, "reply_bytes": 100, "sequence": 9, "length": len(body)} | changes
    message = memoryview(bytearray(FRAME_BYTES) + body)
    write_frame(Frame(Kind.REQUEST, **said, key=bytes(range(16))), message, CHECKSUM)
    return message


def opened(message: memoryview, most: int = 2**20) -> bytes:
    return bytes(check_body(read_frame(message, most), message, CHECKSUM))


@given(st.binary(max_size=300))
def test_what_is_written_is_read(body: bytes) -> None:
    message = framed(body)
    frame = read_frame(message, 300)
    assert (frame.kind, frame.session, frame.generation, frame.sequence) == (Kind.REQUEST, 7, 3, 9)
    assert (frame.reply_bytes, frame.length, frame.key) == (100, len(body), bytes(range(16)))
    assert opened(message) == body


@given(st.binary(max_size=40), st.data())
def test_one_wrong_bit_anywhere_is_found(body: bytes, data: st.DataObject) -> None:
    message = framed(body)
    bit = data.draw(st.integers(0, len(message) * 8 - 1))
    message[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransportFault) as caught:
        opened(message)
    assert caught.value.fault in (Fault.LENGTH, Fault.CHECKSUM)


@pytest.mark.parametrize("length", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 9])
def test_a_message_that_ends_early_is_refused(length: int) -> None:
    with pytest.raises(TransportFault) as caught:
        opened(framed(b"0123456789")[:length])
    assert caught.value.fault is Fault.LENGTH


def test_a_body_past_the_limit_is_refused_before_it_is_awaited() -> None:
    assert read_frame(framed(bytes(10))[:FRAME_BYTES], 10).length == 10
    with pytest.raises(TransportFault) as caught:
        read_frame(framed(bytes(10))[:FRAME_BYTES], 9)
    assert caught.value.fault is Fault.LENGTH


def test_a_refusal_keeps_its_class_and_text() -> None:
    error = read_refusal(
        memoryview(write_refusal(Fault.REFUSED, StaleReference("page 3 is at generation 4")))
    )
    assert (type(error), str(error)) == (StaleReference, "page 3 is at generation 4")
    fault = read_refusal(memoryview(write_refusal(Fault.KEY, NotFound("no"))))
    assert isinstance(fault, TransportFault)
    assert fault.fault is Fault.KEY
    assert len(write_refusal(Fault.REFUSED, HotsetError("é" * 5000))) == MAX_REFUSAL_BYTES
    assert isinstance(read_refusal(memoryview(b"\xff\xfe")), TransportFault)
