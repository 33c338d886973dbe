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
        self.device_pages = torch.zeros_like(self.host_pages)
        # Where the copies to a GPU start from; a place is written again only after the step that reads it.
        self._staged = torch.zeros(2, rows, max_pages, dtype=torch.int32, pin_memory=device.type == "cuda")

    def put(self, row: int, first: int, host_pages: Sequence[int], device_pages: Sequence[int]) -> None:
        """Say where pages `first`, `first` + 1, ... of `row` lie; both lists have the same length."""
        run = slice(first, first + len(host_pages))
        for staged, table, pages in (
            (self._staged[0], self.host_pages, host_pages),
            (self._staged[1], self.device_pages, device_pages),
        ):
            staged.numpy()[row, run] = pages
            table[row, run].copy_(staged[row, run], non_blocking=True)

    def arena_pages(self, row: int, count: int) -> torch.Tensor:
        """The first `count` pages of `host_pages[row]`, int32 in host memory, valid until the next `put`."""
        return self._staged[0, row, :count]
