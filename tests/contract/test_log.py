from __future__ import annotations

import logging
import re

from services.contract.log import KeyValueFormatter


def test_one_line_an_event_in_utc() -> None:
    record = logging.LogRecord(
        "any", logging.WARNING, "f.py", 1, "attach client=%s pages=%d", ("engine-0", 3), None
    )
    record.created, record.msecs = 0.25, 250.0
    line = KeyValueFormatter().format(record)
    assert line == "ts=1970-01-01T00:00:00.250Z level=warning event=attach client=engine-0 pages=3"


def test_a_traceback_stands_below_its_line() -> None:
    error = ValueError("why")
    record = logging.LogRecord("any", logging.ERROR, "f.py", 1, "rpc_failed", None, (ValueError, error, None))
    assert re.fullmatch(
        r"ts=\S+ level=error event=rpc_failed\nValueError: why", KeyValueFormatter().format(record)
    )
