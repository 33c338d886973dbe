"""Reads pages of another store on this node, out of its arena file: nothing is sent, and it is not asked.

Knows the file's headers. Who may open the file may read it, so there is no key; the pages are pinned over
gRPC as for any other transport, and are compared with their headers before and after they are copied.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from services.contract.errors import HotsetError, InvalidRequest
from services.contract.file_header import FileHeader, read_file_header
from services.contract.layout import ArenaLayout
from services.contract.page_header import PAGE_HEADER
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.protocol import Grant, Request
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_refs import PageRefs
from services.kvstore.page_request import read_request
from services.kvstore.sealed_check import check_sealed


class MappedSource:
    """The Service of a MappedRequester."""

    def __init__(self, path: Path, header: FileHeader) -> None:
        """Map the arena at `path`, which must be laid out as `header` says.

        Raises:
            TransportFault: LOST, there is no such arena on this node, or no longer.
        """
        self._path = path
        try:
            with path.open("rb") as file:
                self._inode = path.stat().st_ino
                buffer = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            found = read_file_header(buffer)
        except (OSError, HotsetError, ValueError) as error:
            raise TransportFault(Fault.LOST, f"cannot map the peer's arena {path}: {error}") from error
        if found != header:
            raise TransportFault(Fault.LOST, f"the peer's arena {path} is laid out for something else")
        layout = ArenaLayout.fit(len(buffer), header.page_tokens, header.planes)
        end = layout.page_headers_offset + layout.page_count * PAGE_HEADER.itemsize
        self._headers = np.frombuffer(buffer[layout.page_headers_offset : end], PAGE_HEADER)
        self._bytes = PageBytes(buffer, layout)

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
        self._check(refs)
        length = self._bytes.pack(refs.pages, out)
        self._check(refs)
        return length

    def _check(self, refs: PageRefs) -> None:
        try:
            same = self._path.stat().st_ino == self._inode
        except OSError:
            same = False
        if not same:
            raise TransportFault(Fault.LOST, f"the peer's arena {self._path} is gone")
        if refs.pages.max() >= len(self._headers):
            raise InvalidRequest(f"there is no page {int(refs.pages.max())}")
        check_sealed(self._headers[refs.pages], refs)
