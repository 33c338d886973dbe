"""attend_latent: decode attention where all heads share one latent record a token (MLA, absorbed form).

A record is what DeepSeek-V3.2 keeps of a token and layer: a latent vector (512 numbers) and a roped key (64).
The heads' own key and value projections are absorbed into the query before and into the output after, so
every head scores the whole record, and its values are the latent part.

Knows slots and positions, not rows' histories.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.decoder.kernels.record_code import decode_records


def attend_latent(
    query: Tensor, pool: Tensor, slots: Tensor, selected: Tensor, length: Tensor, scaling: float, latent: int
) -> Tensor:
    """One query a row over the tokens it chose, masked to the row's true length.

    Args:
        query: [rows, heads, latent + roped], absorbed.
        pool: [pool slots, block_tokens, latent + roped], or coded (record_code.py).
        slots: [rows, top_k] int32 pool slots, -1 = none; at least one is valid in every row.
        selected: [rows, top_k] int32, the blocks in those slots, -1 = none.
        length: [rows] int64 tokens, the newest included.
        scaling: factor on q.k.
        latent: numbers of a record that are its value.

    Returns:
        [rows, heads, latent].
    """
    rows = slots.shape[0]
    block_tokens = pool.shape[1]
    # A row pads with one of its own slots, so that no other row's bytes are ever multiplied.
    own = torch.where(slots < 0, slots.amax(1, keepdim=True), slots)
    records = pool.index_select(0, own.reshape(-1)).flatten(0, 1)
    if pool.dtype == torch.uint8:
        records = decode_records(records, latent, query.shape[2] - latent, query.dtype)
    records = records.view(rows, -1, records.shape[1])
    position = selected.unsqueeze(2) * block_tokens + torch.arange(block_tokens, device=pool.device)
    seen = (position < length.view(-1, 1, 1)) & (selected >= 0).unsqueeze(2)
    # All heads read the same records, so they stand where torch expects several query positions.
    return scaled_dot_product_attention(
        query.unsqueeze(1),
        records.unsqueeze(1),
        records[..., :latent].unsqueeze(1),
        attn_mask=seen.view(rows, 1, 1, -1),
        scale=scaling,
    ).squeeze(1)
