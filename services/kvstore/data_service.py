"""What stands behind a store's responders: requests go to whoever answers their kind.

Knows sessions' grants and the first word of a request.
"""

from __future__ import annotations

from services.contract.slot_request import Wanted, wanted_of
from services.contract.transport.protocol import Grant, Request
from services.kvstore.page_source import PageSource
from services.kvstore.slot_desk import SlotDesk
from services.kvstore.store_parts import StoreParts


class DataService:
    """The Service of a store."""

    def __init__(self, parts: StoreParts, pages: PageSource, slots: SlotDesk) -> None:
        self._parts = parts
        self._pages = pages
        self._slots = slots

    def grant(self, session: int) -> Grant | None:
        """As Service says."""
        found = self._parts.sessions.get(session)
        return None if found is None else Grant(found.epoch, found.data_key)

    def answer(self, request: Request, out: memoryview) -> int:
        """As Service says.

        Raises:
            HotsetError: as who answers says, or InvalidRequest: nobody does.
        """
        wanted = wanted_of(request.body)
        if wanted is Wanted.PAGES:
            return self._pages.answer(request, out)
        if wanted is Wanted.READ:
            return self._slots.read(request, out)
        return self._slots.write(request)
