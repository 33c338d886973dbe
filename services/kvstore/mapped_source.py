"""Reads pages of another store on this node, out of its arena file: nothing is sent, and it is not asked.

Knows the file's headers. Who may open the file may read it, so there is no key; the pages are pinned over
gRPC as for any other transport, and are compared with their headers before and after they are copied. The
file is mapped for one answer only: memory of an arena that its store has removed is to be free at once.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from services.contract.errors import HotsetError, InvalidRequest, StaleReference
from services.contract.file_header import FileHeader, read_file_header
from services.contract.layout import ArenaLayout
from services.contract.page_header import PAGE_HEADER, PageState
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.protocol import Grant, Request
from services.kvstore.arena import PageHeaders
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_refs import PageRefs
from services.kvstore.page_request import read_request


class MappedSource:
    """The Service of a MappedRequester."""

    def __init__(self, path: Path, header: FileHeader) -> None:
        """Map the arena at `path`, which must be laid out as `header` says.

        Raises:
            TransportFault: LOST, there is no such arena on this node, or no longer.
        """
        self._path, self._header = path, header
        self._inode, buffer = self._map()
        self._layout = ArenaLayout.fit(len(buffer), header.page_tokens, header.planes)

    def grant(self, session: int) -> Grant | None:
        """Nobody asks: as Service says."""
        return None

    def answer(self, request: Request, out: memoryview) -> int:
        """As Service says.

        Raises:
            TransportFault: LOST, the arena is not the one that was mapped.
            InvalidRequest, StaleReference: there are no such pages, or not in this life.
        """
        refs = read_request(request.body)
        inode, buffer = self._map()
        if inode != self._inode:
            raise TransportFault(Fault.LOST, f"the peer's arena {self._path} is gone")
        start, count = self._layout.page_headers_offset, self._layout.page_count
        headers = np.frombuffer(buffer[start : start + count * PAGE_HEADER.itemsize], PAGE_HEADER)
        _check(headers, refs)
        length = PageBytes(buffer, self._layout).pack(refs.pages, out)
        _check(headers, refs)
        return length

    def _map(self) -> tuple[int, memoryview]:
        """The file's inode, and its bytes for as long as somebody looks at them."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                buffer = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            found = read_file_header(buffer)
        except (OSError, HotsetError, ValueError) as error:
            raise TransportFault(Fault.LOST, f"cannot map the peer's arena {self._path}: {error}") from error
        if found != self._header:
            raise TransportFault(Fault.LOST, f"the peer's arena {self._path} is laid out for something else")
        return inode, buffer


def _check(headers: PageHeaders, refs: PageRefs) -> None:
    if refs.pages.max() >= len(headers):
        raise InvalidRequest(f"there is no page {int(refs.pages.max())}")
    found = headers[refs.pages]
    wrong = (found["generation"] != refs.generations) | (found["state"] != int(PageState.SEALED))
    if wrong.any():
        raise StaleReference(f"page {int(refs.pages[wrong.argmax()])} is not what it was")
