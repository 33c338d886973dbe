"""Pages and seals to and from the wire.

Knows both shapes and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from hotset.v1 import kvstore_pb2 as pb

from services.contract.page_header import NO_PAGE
from services.decoder.engine.host_pages import HostPage, SealOrder

_NOTHING = HostPage(NO_PAGE, 0)  # before the first page of a sequence


def to_wire(pages: Iterable[HostPage]) -> pb.PageRefs:
    """As a message."""
    listed = list(pages)
    return pb.PageRefs(pages=[page.page for page in listed], generations=[page.generation for page in listed])


def from_wire(refs: pb.PageRefs) -> list[HostPage]:
    """Out of a message."""
    return list(map(HostPage, refs.pages, refs.generations))


def marked(refs: pb.PageRefs, bits: bytes) -> list[HostPage]:
    """Those whose bit is set, the lowest of the first byte for the first."""
    return [page for at, page in enumerate(from_wire(refs)) if bits[at // 8] >> at % 8 & 1]


def tokens_to_wire(tokens: Sequence[int]) -> bytes:
    """Token ids, 4 bytes each, little-endian."""
    return np.asarray(tokens, "<u4").tobytes()


def seals_to_wire(seals: Sequence[SealOrder], *, with_tokens: bool) -> pb.Seals:
    """As a message."""
    return pb.Seals(
        pages=to_wire(seal.page for seal in seals),
        page_hashes=[seal.page_hash for seal in seals],
        parents=to_wire(seal.parent or _NOTHING for seal in seals),
        tokens=[tokens_to_wire(seal.tokens) for seal in seals] if with_tokens else (),
    )
