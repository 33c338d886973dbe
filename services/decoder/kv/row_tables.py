"""Per row: page -> host page, and page -> device page.

Knows where a row's pages lie, not how long the row is nor what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
