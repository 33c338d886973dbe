"""Which hashes nobody had, a moment ago, so that a prompt that waits does not ask at every step.

Knows hashes and the clock.
"""

from __future__ import annotations

import time
from collections import OrderedDict

_MOST = 4096
_SECONDS = 2.0


class Asked:
    """Forgets the oldest first."""

    def __init__(self) -> None:
        self._at: OrderedDict[bytes, float] = OrderedDict()

    def lately(self, page_hash: bytes) -> bool:
        """Whether nobody had it within the last seconds."""
        return time.monotonic() - self._at.get(page_hash, -_SECONDS) < _SECONDS

    def note(self, page_hash: bytes) -> None:
        """Nobody has it now."""
        self._at[page_hash] = time.monotonic()
        self._at.move_to_end(page_hash)
        if len(self._at) > _MOST:
            self._at.popitem(last=False)
