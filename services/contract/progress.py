"""How far something long is: a bar where a terminal shows it, now and then a line elsewhere.

Knows streams and numbers; nothing of what goes on.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tqdm import tqdm

from services.contract.byte_size import format_bytes

LINE_SECONDS = 10.0
"""Between lines where there is no terminal."""


class Progress:
    """Use as a context: the bar goes at its end. For one thread."""

    def __init__(self, what: str, total: int, unit: str = "B", stream: TextIO | None = None) -> None:
        """Begin at nothing.

        Args:
            what: it is, for people.
            total: of all there is to do; 0 = not known.
            unit: of `total`; `B` is told in MiB and GiB.
            stream: standard error if None.
        """
        self._what, self._total, self._unit = what, total, unit
        self._stream = stream or sys.stderr
        self._told = time.monotonic()
        self._done = 0  # as `add` counts it
        tqdm.monitor_interval = 0  # its thread would be in the way of a later fork
        self._bar = tqdm(
            total=total or None,
            desc=what,
            unit=unit if unit == "B" else f" {unit}",
            unit_scale=unit == "B",
            unit_divisor=1024,
            file=self._stream,
            leave=False,
            dynamic_ncols=True,
            disable=not self._stream.isatty(),
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def at(self, done: int, note: str = "", total: int = 0) -> None:
        """So much is done.

        Args:
            done: since the beginning.
            note: what is going on now.
            total: where it became known only now.
        """
        self._total = total or self._total
        if not self._bar.disable:
            self._bar.total = self._total or None
            self._bar.bar_format = None if self._total else "{desc}: {elapsed} {postfix}"
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.n = done
            self._bar.refresh()
            return
        if time.monotonic() - self._told >= LINE_SECONDS:
            self._told = time.monotonic()
            parts = (self._what, self._share(done), note)
            self.line(" ".join(part for part in parts if part))

    def add(self, count: int) -> None:
        """So much more is done."""
        self._done += count
        self.at(self._done)

    def line(self, text: str) -> None:
        """A whole line; a bar moves below it."""
        tqdm.write(text, file=self._stream)
        self._stream.flush()

    def _share(self, done: int) -> str:
        if not self._total:
            return ""
        if self._unit == "B":
            return f"{format_bytes(done)} of {format_bytes(self._total)}"
        return f"{done} of {self._total} {self._unit}"
