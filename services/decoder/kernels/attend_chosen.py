"""attend_chosen: prefill's attention over a part of what its queries chose, on latent records.

Knows which records of the part each query may see, nothing of the others; all heads share a record. The part
is attended to with a mask, some queries at a time: what is computed in vain costs less than gathering each
query's own records.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.record_code import decode_records

_SCORES_AT_ONCE = 2**23
"""Scores of queries, heads and records that are held at once: 32 MiB."""
_NOTHING = -1e30
"""The weight of a part in which a query chose nothing: finite, so that two such parts merge into a third."""


def attend_chosen(query: Tensor, record: Tensor, chosen: Tensor, scaling: float, latent: int) -> Part:
    """Attention of T queries over those of n records that each chose.

    Args:
        query: [T, heads, latent + roped], absorbed.
        record: [n, latent + roped], or coded (record_code.py).
        chosen: [T, top_k] integers: records 0 to n - 1 are seen, every other number means nothing here.
        scaling: factor on q.k.
        latent: numbers of a record that are its value.

    Returns:
        a Part whose `out` is [T, heads, latent] float32; zeros where a query chose no record of these.
    """
    tokens, heads, width = query.shape
    size = record.shape[0]
    if record.dtype == torch.uint8:
        record = decode_records(record, latent, width - latent, query.dtype)
    keys = record.float()
    out = torch.empty(tokens, heads, latent, device=query.device)
    lse = torch.empty(tokens, heads, device=query.device)
    step = max(1, _SCORES_AT_ONCE // (heads * size))
    for first in range(0, tokens, step):
        some = slice(first, min(first + step, tokens))
        own = chosen[some].long()
        seen = torch.zeros(own.shape[0], size + 1, dtype=torch.bool, device=query.device)
        seen.scatter_(1, own.masked_fill((own < 0) | (own >= size), size), True)
        scores = (query[some].float().flatten(0, 1) @ keys.t()).view(-1, heads, size) * scaling
        scores.masked_fill_(~seen[:, None, :size], float("-inf"))
        total = scores.logsumexp(2)
        lse[some] = torch.where(seen[:, :size].any(1, keepdim=True), total, _NOTHING)
        out[some] = scores.sub_(lse[some].unsqueeze(2)).exp_() @ keys[:, :latent]
    return Part(out, lse)
