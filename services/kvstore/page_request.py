"""What one store asks of another's data plane: pages, by number and generation.

Knows how that is written: u32 PAGES, u32 zero (contract/slot_request.py), then u32 page, u32 generation,
once a page, little-endian. The answer is the bytes of the pages as page_bytes.py packs them, and no fewer.
"""

from __future__ import annotations

import numpy as np

from services.contract.errors import InvalidRequest
from services.contract.slot_request import READ_OVERHEAD_BYTES, Wanted, wanted_of, write_head
from services.kvstore.page_refs import PageRefs

_REF_BYTES = 8


def write_request(refs: PageRefs) -> bytes:
    """A request for `refs`."""
    numbers = np.empty((len(refs), 2), "<u4")
    numbers[:, 0], numbers[:, 1] = refs.pages, refs.generations
    return write_head(Wanted.PAGES) + numbers.tobytes()


def read_request(body: memoryview) -> PageRefs:
    """The pages that a request names.

    Raises:
        InvalidRequest: it names none, or is none.
    """
    rest = body[READ_OVERHEAD_BYTES:]
    if wanted_of(body) is not Wanted.PAGES or not rest or len(rest) % _REF_BYTES:
        raise InvalidRequest(f"{len(body)} bytes do not name pages")
    return PageRefs.of_numbers(np.frombuffer(rest, "<u4").tolist())
