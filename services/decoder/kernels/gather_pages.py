"""From pages to one run of records: what prefill's attention reads.

Knows the order inside a page (docs/records.md), not whose the pages are nor where they lie.
"""

from __future__ import annotations

from torch import Tensor


def gather_pages(source: Tensor, pages: Tensor, out: Tensor) -> None:
    """Copy pages so that each group's records lie in token order.

    Args:
        source: [all pages, groups, page_tokens, record elements].
        pages: [n] int32, in token order.
        out: [groups, n * page_tokens, record elements], contiguous; written.
    """
    room = out.view(out.shape[0], -1, *source.shape[2:])
    room.copy_(source[pages.long()].transpose(0, 1))
