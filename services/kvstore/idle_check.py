"""When the store's books are checked: once after it has come to rest, and at the end.

Knows the store by its calls. A check of a large arena takes a good part of a second, in which no client is
answered, so it waits until nobody holds a page and nothing has happened for a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from services.contract.errors import HotsetError
from services.kvstore.snapshot import StoreSnapshot
from services.kvstore.store import Store

_log = logging.getLogger(__name__)
_BEATS = 5  # without a change


class IdleCheck:
    """Call `beat` a few times a second."""

    def __init__(self, store: Store, count: Callable[[], object]) -> None:
        """`count` is called for every breach."""
        self._store = store
        self._count = count
        self._last: StoreSnapshot | None = None
        self._quiet = 0  # beats

    def beat(self, now: StoreSnapshot) -> None:
        """Check if it is time to."""
        same = self._last is not None and (now.pages, now.counters) == (self._last.pages, self._last.counters)
        self._last, self._quiet = now, self._quiet + 1 if same else 0
        if self._quiet == _BEATS and not now.pages.held:
            self.check()

    def check(self) -> None:
        """Compare everything with everything; a breach is logged and counted, and the store goes on."""
        try:
            self._store.check_integrity()
        except HotsetError as error:
            _log.error("integrity_violated what=%r", str(error))
            self._count()
