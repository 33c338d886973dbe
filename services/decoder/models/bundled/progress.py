"""One line of progress for the person who waits, on standard error; standard output carries the answer.

Knows nothing of what is going on.
"""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Write `line` to standard error at once."""
    sys.stderr.write(f"default model: {line}\n")
    sys.stderr.flush()
