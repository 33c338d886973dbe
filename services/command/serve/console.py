"""Lines for the person at the terminal, which may be a file, or a pipe that nobody reads any more.

Knows nothing of what the lines say.
"""

from __future__ import annotations

import os
import sys

from tqdm import tqdm


class Console:
    """Writes whole lines at once; goes quiet when its reader is gone, so that the services live on."""

    def line(self, text: str) -> None:
        """Write one line to standard output."""
        try:
            tqdm.write(text)  # above a bar, where one is shown
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def say(self, text: str) -> None:
        """Write a line of our own, beside those of the children."""
        self.line(f"{'hotset':<8}| {text}")
