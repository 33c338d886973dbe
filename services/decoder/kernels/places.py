"""From pages to blocks: where each block of a row lies, physically.

Knows the order of docs/records.md inside a page, on either side; not whose the pages are.
"""

from __future__ import annotations

import torch
from torch import Tensor


def blocks_of(pages: Tensor, groups: int, blocks_per_page: int) -> Tensor:
    """Physical block numbers of all the blocks of some pages.

    Args:
        pages: [rows, P] physical pages.
        groups: groups of a page.
        blocks_per_page: blocks of a group.

    Returns:
        [rows, groups, P * blocks_per_page] int64: (page * groups + group) * blocks_per_page + block.
    """
    group = torch.arange(groups, device=pages.device).view(1, -1, 1, 1)
    block = torch.arange(blocks_per_page, device=pages.device)
    first = (pages.long().view(pages.shape[0], 1, -1, 1) * groups + group) * blocks_per_page
    return (first + block).flatten(2)
