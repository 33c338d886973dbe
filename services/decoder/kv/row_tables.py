"""Per row: page -> host page, and page -> device page.

Knows where a row's pages lie, not how long the row is nor what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class RowTables:
    """Two tables of `[rows, max_pages]` int32; entries past a row's last page are 0 and never read."""

    def __init__(self, rows: int, max_pages: int, device: torch.device) -> None:
        self.host_pages = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.device_pages = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)

    def put(self, row: int, first: int, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        """Say where pages `first`, `first` + 1, ... of `row` lie; both lists have the same length."""
        last = first + len(host_pages)
        self.host_pages[row, first:last] = torch.tensor(host_pages, dtype=torch.int32)
        self.device_pages[row, first:last] = torch.tensor(device_pages, dtype=torch.int32)

    @staticmethod
    def blocks(pages: Tensor, groups: int, blocks_per_page: int) -> Tensor:
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
