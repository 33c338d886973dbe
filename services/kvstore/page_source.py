"""Reads pages for other stores: only those that the asking session holds, only in the life that it means.

Knows the store's parts. It runs in a responder's thread beside the event loop, reads and never changes
anything: a page is checked before its bytes are copied **and after**. A page is written only after its
generation has changed, so bytes between two checks that agree are the page's.
"""

from __future__ import annotations

from services.contract.errors import NotFound, StateConflict
from services.contract.page_header import PageState
from services.contract.transport.protocol import Request
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_refs import PageRefs
from services.kvstore.page_request import read_request
from services.kvstore.store_parts import StoreParts


class PageSource:
    """Behind a store's responders."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._bytes: PageBytes | None = None
        self.pages = 0  # given away

    def answer(self, request: Request, out: memoryview) -> int:
        """Answer a request for pages, as Service says.

        Raises:
            InvalidRequest: there are no such pages, or too many for `out`.
            NotFound, StaleReference, StateConflict: the session does not hold them, or not in this life.
        """
        refs = read_request(request.body)
        self._check(request.session, refs)
        length = self._page_bytes().pack(refs.pages, out)
        self._check(request.session, refs)
        self.pages += len(refs)
        return length

    def _check(self, session: int, refs: PageRefs) -> None:
        if self._parts.sessions.get(session) is None:
            raise NotFound(f"session {session:016x} is over")
        self._parts.space.table.check_held(session, refs)
        open_pages = self._parts.arena.page_headers()["state"][refs.pages] != int(PageState.SEALED)
        if open_pages.any():
            raise StateConflict(f"page {int(refs.pages[open_pages.argmax()])} is not sealed")

    def _page_bytes(self) -> PageBytes:
        layout = self._parts.arena.layout
        if layout is None:
            raise StateConflict("the arena is not laid out")
        if self._bytes is None or self._bytes.layout is not layout:
            self._bytes = PageBytes(self._parts.arena.buffer, layout)
        return self._bytes
