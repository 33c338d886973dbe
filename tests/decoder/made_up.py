"""A tiny made-up arena and rows on it, without any model: for tests of where KV lies."""

from __future__ import annotations

from pathlib import Path

import torch

from services.contract.layout import ArenaLayout
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.row_tables import RowTables
from services.decoder.kv.shape import KvShape

CPU = torch.device("cpu")
MAX_PAGES = 5


def shape(groups: int = 3, dtype: torch.dtype = torch.float32) -> KvShape:
    """Two layers of three KV heads; blocks of 4, pages of 12 tokens."""
    return KvShape(
        layers=2, kv_heads=3, head_dim=8, groups=groups, block_tokens=4, page_tokens=12, dtype=dtype
    )


def layout(of: KvShape, pages: int = 23) -> ArenaLayout:
    planes = of.planes(with_index=True)
    room = sum(plane.page_bytes for plane in planes) * pages
    return ArenaLayout.fit(2 * 2**20 + room, of.page_tokens, planes)


def arena(of: KvShape, path: Path) -> ArenaMap:
    """A map of a file full of garbage that would show: every float of it is a NaN."""
    laid_out = layout(of)
    path.write_bytes(b"\xff" * laid_out.arena_bytes)
    return ArenaMap(path, laid_out, of, torch.device("cpu"))


def tables(rows: int = 4) -> RowTables:
    """Scattered pages, no two rows sharing one; entries past a row's end are garbage, but valid pages."""
    made = RowTables(rows, MAX_PAGES, CPU)
    host = torch.randperm(23, generator=torch.Generator().manual_seed(3))[: rows * MAX_PAGES]
    device = torch.randperm(21, generator=torch.Generator().manual_seed(4))[: rows * MAX_PAGES]
    for row in range(rows):
        own = slice(row * MAX_PAGES, (row + 1) * MAX_PAGES)
        made.put(row, 0, host[own].tolist(), device[own].tolist())
    return made


def place(of: KvShape, pages: torch.Tensor, group: int, token: int) -> int:
    """The flat place of a record, counted in records, as docs/records.md says it."""
    page, rest = divmod(token, of.page_tokens)
    block, offset = divmod(rest, of.block_tokens)
    return ((int(pages[page]) * of.groups + group) * of.blocks_per_page + block) * of.block_tokens + offset
