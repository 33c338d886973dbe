"""Log lines as key=value, one line an event, on standard error.

Knows no event; a message is `event key=value ...`, written where it happens.
"""

from __future__ import annotations

import logging
import time


class KeyValueFormatter(logging.Formatter):
    """`ts=2026-01-31T12:00:00.000Z level=info event=attach client=engine-0 ...`, UTC."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("ts=%(asctime)s level=%(level)s event=%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it where there is one."""
        record.level = record.levelname.lower()
        return super().format(record)


def configure_logging(level: str) -> None:
    """Send every line of at least `level` to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(KeyValueFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
