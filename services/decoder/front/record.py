"""What is known of one HTTP request, for its log line. Made by access.py, filled in by routes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from services.decoder.front.answer import Tally

_STATE_KEY = "hotset_record"


@dataclass(slots=True)
class Record:
    """One HTTP request.

    Attributes:
        request_id: from the client's X-Request-Id, or made here.
        began: when it came, monotonic seconds.
        tally: its tokens.
        answer_id: the id in the answer's body, if it has one.
        client_left: the connection closed before the answer was sent.
        error: code and message of what was answered instead, or within a stream.
    """

    request_id: str
    began: float = field(default_factory=time.monotonic)
    tally: Tally = field(default_factory=Tally)
    answer_id: str = ""
    client_left: bool = False
    error: str = ""


def record_of(request: Request) -> Record:
    """The record that access.py made for this request."""
    record = request.scope["state"][_STATE_KEY]
    assert isinstance(record, Record)
    return record


def state_with(record: Record) -> dict[str, object]:
    """What access.py puts into the scope's state."""
    return {_STATE_KEY: record}
