"""References and seals to and from messages: columns on both sides.

Knows both shapes and nothing else.
"""

from __future__ import annotations

import numpy as np
from hotset.v1 import kvstore_pb2 as pb

from services.contract.errors import InvalidRequest
from services.kvstore.orders import check_tokens
from services.kvstore.page_refs import PageRefs
from services.kvstore.seals import Seals


def refs_from_wire(message: pb.PageRefs) -> PageRefs:
    """Out of a message.

    Raises:
        InvalidRequest: its columns differ in length.
    """
    refs = PageRefs(np.array(message.pages, np.int64), np.array(message.generations, np.uint32))
    if len(refs.pages) != len(refs.generations):
        raise InvalidRequest(f"{len(refs.pages)} pages and {len(refs.generations)} generations; one each")
    return refs


def refs_to_wire(refs: PageRefs) -> pb.PageRefs:
    """As a message."""
    return pb.PageRefs(pages=refs.pages.tolist(), generations=refs.generations.tolist())


def seals_from_wire(message: pb.Seals) -> Seals:
    """Out of a message.

    Raises:
        InvalidRequest: its columns differ in length, or a token id is cut.
    """
    pages, parents = refs_from_wire(message.pages), refs_from_wire(message.parents)
    seals = Seals(pages, list(message.page_hashes), parents, list(message.tokens))
    lengths = [len(seals.pages), len(seals.page_hashes), len(seals.parents)]
    if len(set(lengths)) != 1:
        raise InvalidRequest("seals name {} pages, {} hashes and {} parents; one each".format(*lengths))
    if seals.tokens and len(seals.tokens) != len(seals):
        raise InvalidRequest(
            f"seals name {len(seals)} hashes and tokens of {len(seals.tokens)}; one each or none"
        )
    for tokens in seals.tokens:
        check_tokens(tokens)
    return seals
