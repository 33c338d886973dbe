"""What one store asks of another's data plane: pages, by number and generation.

Knows how that is written: u32 page, u32 generation, once a page, little-endian. The answer is the bytes of
the pages as page_bytes.py packs them, and no fewer.
"""

from __future__ import annotations

import numpy as np

from services.contract.errors import InvalidRequest
from services.kvstore.page_refs import PageRefs

_REF_BYTES = 8


def write_request(refs: PageRefs) -> bytes:
    """A request for `refs`."""
    numbers = np.empty((len(refs), 2), "<u4")
    numbers[:, 0], numbers[:, 1] = refs.pages, refs.generations
    return numbers.tobytes()


def read_request(body: memoryview) -> PageRefs:
    """The pages that a request names.

    Raises:
        InvalidRequest: it names none, or is none.
    """
    if not body or len(body) % _REF_BYTES:
        raise InvalidRequest(f"{len(body)} bytes do not name pages")
    return PageRefs.of_numbers(np.frombuffer(body, "<u4").tolist())
