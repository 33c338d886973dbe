"""What the compose test tells whoever watches: one line a step, with the time since it began."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """One line, at once."""
    print(f"compose-test: {text}", flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Tell that something is done, and how long it took."""
    start = time.monotonic()
    say(f"{what} ...")
    yield
    say(f"{what}: {time.monotonic() - start:.1f} s")
