"""Whether pages that somebody reads from outside are sealed, and in the life that is meant.

Knows headers and references. A page is written only after its generation has changed, so where this holds
before bytes are copied **and after**, they are the page's.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from services.contract.errors import StaleReference
from services.contract.page_header import PageState
from services.kvstore.page_refs import PageRefs


def check_sealed(headers: npt.NDArray[Any], refs: PageRefs) -> None:
    """Compare `headers`, `[n]` of PAGE_HEADER, with the `n` references they belong to.

    Raises:
        StaleReference: a page is not what it was.
    """
    wrong = (headers["generation"] != refs.generations) | (headers["state"] != int(PageState.SEALED))
    if wrong.any():
        raise StaleReference(f"page {int(refs.pages[wrong.argmax()])} is not what it was")
