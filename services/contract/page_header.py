"""The page headers: what a store must find again after it was killed, one entry a host page.

Knows only bytes; which page may change when is the store's affair. Written by the store alone.
`state` is written last, so a header is either the old one or complete: the other fields change only where the
old state does not read them (FREE reads none but the generation, OPEN no hash and no parent).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class PageState(IntEnum):
    """The life of a host page."""

    FREE = 0
    OPEN = 1  # held by one session, still written
    SEALED = 2  # full, immutable, findable by hash


PAGE_HEADER = np.dtype(
    {
        "names": ["state", "generation", "hash", "hash_bytes", "parent", "parent_generation", "owner"],
        "formats": ["<u4", "<u4", ("u1", (32,)), "<u4", "<u4", "<u4", "<u8"],
        "offsets": [0, 4, 16, 8, 48, 52, 56],
        "itemsize": 128,
    }
)
"""owner: session id of an OPEN page. parent: page before it in the sequence, NO_PAGE for the first."""

NO_PAGE = 0xFFFFFFFF
