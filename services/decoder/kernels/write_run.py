"""A prompt's run of keys and values, as records into pages.

Knows the order inside a page (docs/records.md), not whose the pages are nor where they lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kernels.append import make_records


def write_run(key: Tensor, value: Tensor, target: Tensor, pages: Tensor, first: int) -> None:
    """Write the records of consecutive tokens.

    Args:
        key: [tokens, kv_heads, head_dim], after rope.
        value: the same shape.
        target: [all pages, groups, page_tokens, record elements]; written.
        pages: [n] int32, in token order, from the first that the run touches.
        first: where the run begins in that page, tokens.
    """
    groups, page_tokens, elements = target.shape[1:]
    position = torch.arange(first, first + key.shape[0], device=key.device)
    page = pages.long()[position // page_tokens].unsqueeze(1)
    group = torch.arange(groups, device=key.device)
    places = (page * groups + group) * page_tokens + (position % page_tokens).unsqueeze(1)
    target.view(-1, elements).index_copy_(0, places.flatten(), make_records(key, value, groups))
