"""Whether pages can be sealed as ordered, all at once and before anything changes.

Knows headers and what the holder holds; changes nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.contract.errors import StateConflict
from services.contract.page_header import NO_PAGE
from services.kvstore.header_columns import OPEN, SEALED, HeaderColumns
from services.kvstore.holdings import Counts
from services.kvstore.orders import check_hash_lengths
from services.kvstore.page_refs import PageRefs
from services.kvstore.recency import Pages
from services.kvstore.seals import Seals


def check_seals(seals: Seals, headers: HeaderColumns, owned: Counts, released: Pages, counts: Counts) -> None:
    """Refuse seals of pages that are not the holder's, open and behind a sealed parent.

    Args:
        seals: as ordered.
        headers: of the arena.
        owned: the holder's references to every page, `[pages]`.
        released: pages that the same call gives back before it seals, ascending, `[n]`.
        counts: how often each of `released`.

    Raises:
        InvalidRequest, StaleReference, StateConflict: of one that is impossible.
    """
    if not len(seals):
        return
    pages, parents = seals.pages.pages, seals.parents.pages
    follows = np.flatnonzero(parents != NO_PAGE)
    named = PageRefs(
        np.concatenate([pages, parents[follows]]),
        np.concatenate([seals.pages.generations, seals.parents.generations[follows]]),
    )
    headers.check_live(named)
    held = owned[named.pages]
    lacking = held <= _given_back(named.pages, released, counts)
    if lacking.any():
        raise not_held(int(named.pages[lacking.argmax()]), int(held[lacking.argmax()]))
    order = np.argsort(pages, kind="stable")
    ascending = pages[order]
    done = headers.state[pages] != OPEN
    done[order[1:]] |= ascending[1:] == ascending[:-1]
    if done.any():
        raise StateConflict(f"page {int(pages[done.argmax()])} is sealed already")
    check_hash_lengths(seals.page_hashes)
    # A parent is sealed already, or by this call, earlier.
    unsealed = follows[headers.state[parents[follows]] != SEALED]
    at = order[np.minimum(np.searchsorted(ascending, parents[unsealed]), len(pages) - 1)]
    wrong = unsealed[(pages[at] != parents[unsealed]) | (at >= unsealed)]
    if len(wrong):
        raise StateConflict(
            f"page {int(pages[wrong[0]])} has the parent {int(parents[wrong[0]])}, which is not sealed; "
            "seal a sequence's pages in order"
        )


def not_held(page: int, held: int) -> StateConflict:
    """The error of a page that is named once too often."""
    return StateConflict(
        f"page {page} is not held by this session"
        + (f" more than {held} times, and this call gives that back already" if held else "")
    )


def _given_back(pages: Pages, released: Pages, counts: Counts) -> npt.NDArray[np.uint32]:
    """How often the call gives each of `pages` back, `[n]`."""
    if not len(released):
        return np.zeros(len(pages), np.uint32)
    at = np.minimum(np.searchsorted(released, pages), len(released) - 1)
    return np.where(released[at] == pages, counts[at], np.uint32(0))
