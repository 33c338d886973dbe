"""load_pages: what pages of the arena hold, brought into the device's pools.

Knows pages on both sides, one tensor a layer; not what lies in them, nor who waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def load_pages(sources: Sequence[Tensor], targets: Sequence[Tensor], pages: Tensor) -> None:
    """Copy some pages of every layer.

    Args:
        sources: of each layer, [host pages, page elements].
        targets: of each layer, [device pages, page elements]; written.
        pages: [2, n] int64, the pages of the sources and, in the same order, of the targets; no target twice.
    """
    host, device = pages
    for source, target in zip(sources, targets, strict=True):
        target.index_copy_(0, device, source.index_select(0, host))
