"""What every responder does with a whole request: check it, let the service answer, frame the answer.

Knows frames, grants and the service; not how messages travel.
"""

from __future__ import annotations

import hmac
import logging
from typing import NamedTuple

from services.contract.errors import HotsetError, InvalidRequest, NotFound, StaleReference, StateConflict
from services.contract.transport.checksum import Checksum
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import (
    FRAME_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    Frame,
    Kind,
    check_body,
    read_frame,
    write_frame,
)
from services.contract.transport.protocol import Request, Service
from services.contract.transport.refusal import MAX_REFUSAL_BYTES, write_refusal
from services.contract.transport.staging import Staging

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """A framed answer: the first `length` bytes of `buffer`, which is staging's."""

    buffer: memoryview
    length: int


class Answering:
    """One responder's; used by its thread."""

    def __init__(
        self, service: Service, checksum: Checksum, staging: Staging, counters: TransportCounters
    ) -> None:
        self._service = service
        self._checksum = checksum
        self._staging = staging
        self._counters = counters

    def open(self, message: memoryview) -> tuple[Frame, memoryview]:
        """The header and body of a whole message.

        Raises:
            TransportFault: LENGTH or CHECKSUM; counted. Nothing in the message can be believed.
        """
        self._counters.received_bytes += len(message)
        try:
            frame = read_frame(message, MAX_REQUEST_BYTES)
            if len(message) != FRAME_BYTES + frame.length:
                raise TransportFault(
                    Fault.LENGTH, f"a body of {frame.length} bytes came as {len(message) - FRAME_BYTES}"
                )
            return frame, check_body(frame, message, self._checksum)
        except TransportFault as error:
            self._counters.fault(error.fault)
            raise

    def stranger(self, frame: Frame) -> tuple[Fault, HotsetError] | None:
        """Why the sender of `frame` may not ask anything, counted; None if it may."""
        grant = self._service.grant(frame.session)
        if grant is None:
            found: tuple[Fault, HotsetError] = (
                Fault.SESSION,
                NotFound(f"session {frame.session:016x} is not attached"),
            )
        elif not hmac.compare_digest(grant.key, frame.key):
            found = (Fault.KEY, StateConflict("the key is not the session's"))
        elif grant.generation != frame.generation:
            found = (
                Fault.GENERATION,
                StaleReference(f"the session is at epoch {grant.generation}, not {frame.generation}"),
            )
        else:
            return None
        self._counters.fault(found[0])
        return found

    def alive(self, session: int) -> bool:
        """Whether there still is such a session."""
        return self._service.grant(session) is not None

    def answer(self, frame: Frame, body: memoryview) -> Answer:
        """The framed answer to a request, or the refusal."""
        refusal = self.stranger(frame)
        if refusal is not None:
            return self.refuse(frame, *refusal)
        if frame.kind is not Kind.REQUEST or frame.reply_bytes > MAX_REPLY_BYTES:
            self._counters.fault(Fault.LENGTH)
            return self.refuse(frame, Fault.LENGTH, InvalidRequest("no request, or one for too many bytes"))
        buffer = self._staging.take(FRAME_BYTES + frame.reply_bytes)
        try:
            length = self._service.answer(
                Request(frame.session, body), buffer[FRAME_BYTES : FRAME_BYTES + frame.reply_bytes]
            )
        except HotsetError as error:
            self._staging.give(buffer)
            self._counters.fault(Fault.REFUSED)
            return self.refuse(frame, Fault.REFUSED, error)
        except Exception:  # noqa: BLE001  # a fault of ours: logged, and the asker is told no more than that
            _log.exception("data_request_failed session=%016x", frame.session)
            self._staging.give(buffer)
            self._counters.fault(Fault.REFUSED)
            return self.refuse(frame, Fault.REFUSED, HotsetError("internal error; see the server's log"))
        return self._framed(Kind.REPLY, frame, buffer, length)

    def welcome(self, frame: Frame) -> Answer:
        """An empty answer."""
        return self._framed(Kind.REPLY, frame, self._staging.take(FRAME_BYTES), 0)

    def refuse(self, frame: Frame, fault: Fault, error: HotsetError) -> Answer:
        """The framed refusal, which is short enough for every asker's buffer."""
        buffer = self._staging.take(FRAME_BYTES + MAX_REFUSAL_BYTES)
        text = write_refusal(fault, error)
        buffer[FRAME_BYTES : FRAME_BYTES + len(text)] = text
        return self._framed(Kind.REFUSAL, frame, buffer, len(text))

    def _framed(self, kind: Kind, asked: Frame, buffer: memoryview, length: int) -> Answer:
        header = Frame(kind, asked.session, asked.generation, 0, asked.sequence, length)
        write_frame(header, buffer, self._checksum)
        self._counters.requests += 1
        self._counters.sent_bytes += FRAME_BYTES + length
        return Answer(buffer, FRAME_BYTES + length)
