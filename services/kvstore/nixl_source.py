"""Reads pages of another store out of its arena, over nixl: that store is not asked, and does nothing.

Knows the arena's layout. Who was told the arena's address may read it, so there is no key and no sum; the
pages are pinned over gRPC as for any other transport, and their headers are read before their bytes and
after. So is the beginning of the file's header, which tells one layout from another.
"""

from __future__ import annotations

import time

import numpy as np

from services.contract.errors import HotsetError, InvalidRequest
from services.contract.file_header import PREFIX_BYTES, FileHeader, read_file_header
from services.contract.layout import FILE_HEADER_BYTES, ArenaLayout
from services.contract.page_header import PAGE_HEADER
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.nixl_memory import FarMemory, NixlMemory, Spans
from services.contract.transport.nixl_requester import NixlRequester
from services.contract.transport.ucx_worker import UcxOptions
from services.kvstore.page_bytes import page_spans
from services.kvstore.page_refs import PageRefs
from services.kvstore.page_request import read_request
from services.kvstore.sealed_check import check_sealed


class NixlSource:
    """The Reader of a NixlRequester."""

    def __init__(self, memory: FarMemory, header: FileHeader, deadline: float) -> None:
        """Read the arena in `memory`, which must be laid out as `header` says.

        Raises:
            TransportFault: LOST, it is not; or as FarMemory.read says.
        """
        self._memory = memory
        whole = Spans(np.array([0]), np.array([FILE_HEADER_BYTES]))
        with_room = memory.take(FILE_HEADER_BYTES)
        memory.read(whole, with_room[:FILE_HEADER_BYTES], deadline)
        first = with_room[:FILE_HEADER_BYTES]
        self._prefix = bytes(first[:PREFIX_BYTES])
        try:
            found = read_file_header(first)
            self._layout = ArenaLayout.fit(memory.length, header.page_tokens, header.planes)
        except (HotsetError, ValueError) as error:
            raise TransportFault(Fault.LOST, f"the peer's memory is no arena: {error}") from error
        if found != header:
            raise TransportFault(Fault.LOST, "the peer's arena is laid out for something else")
        memory.give(with_room)

    def answer(self, body: memoryview, out: memoryview, deadline: float) -> int:
        """As Reader says.

        Raises:
            InvalidRequest, StaleReference: there are no such pages, or not in this life.
            TransportFault: as FarMemory.read says; or LOST, the arena was laid out anew.
        """
        refs = read_request(body)
        if refs.pages.max() >= self._layout.page_count:
            raise InvalidRequest(f"there is no page {int(refs.pages.max())}")
        length = len(refs) * self._layout.page_bytes
        if length > len(out):
            raise InvalidRequest(f"{len(refs)} pages have {length} bytes and there is room for {len(out)}")
        self._check(refs, deadline)
        self._memory.read(Spans(*page_spans(self._layout, refs.pages)), out[:length], deadline)
        self._check(refs, deadline)
        return length

    def _check(self, refs: PageRefs, deadline: float) -> None:
        size = PAGE_HEADER.itemsize
        offsets = np.concatenate([[0], self._layout.page_headers_offset + refs.pages * size])
        lengths = np.full(len(refs) + 1, size, np.int64)
        lengths[0] = PREFIX_BYTES
        total = int(lengths.sum())
        buffer = self._memory.take(total)
        self._memory.read(Spans(offsets, lengths), buffer[:total], deadline)
        prefix = bytes(buffer[:PREFIX_BYTES])
        headers = np.frombuffer(buffer[PREFIX_BYTES:total], PAGE_HEADER).copy()
        self._memory.give(buffer)
        if prefix != self._prefix:
            raise TransportFault(Fault.LOST, "the peer's arena was laid out anew")
        check_sealed(headers, refs)


def read_over_nixl(
    address: bytes, options: UcxOptions, header: FileHeader, counters: TransportCounters, seconds: float
) -> NixlRequester:
    """A requester for pages of the arena behind `address`, connected within `seconds`.

    Raises:
        TransportFault: DEADLINE, LOST, or the arena is laid out for something else.
        SetupError: nixl or xxhash is missing, or nixl cannot be set up.
    """
    deadline = time.monotonic() + seconds
    try:
        memory = NixlMemory(address, options)
        try:
            source = NixlSource(memory, header, deadline)
        except BaseException:
            memory.close()
            raise
    except TransportFault as error:
        counters.fault(error.fault)
        raise
    return NixlRequester(memory, source, counters)
