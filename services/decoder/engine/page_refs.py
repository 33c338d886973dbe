"""Pages and seals to and from the wire.

Knows both shapes and nothing else.
"""

from __future__ import annotations

from hotset.v1 import kvstore_pb2 as pb

from services.decoder.engine.host_pages import HostPage, SealOrder


def to_wire(page: HostPage) -> pb.PageRef:
    """As a message."""
    return pb.PageRef(page=page.page, generation=page.generation)


def from_wire(ref: pb.PageRef) -> HostPage:
    """Out of a message."""
    return HostPage(ref.page, ref.generation)


def seal_to_wire(seal: SealOrder, *, with_tokens: bool) -> pb.Seal:
    """As a message."""
    parent = None if seal.parent is None else to_wire(seal.parent)
    tokens = seal.tokens if with_tokens else ()
    return pb.Seal(page=to_wire(seal.page), page_hash=seal.page_hash, parent=parent, token_ids=tokens)
