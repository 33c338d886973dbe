"""Rotary positions on a fused projection of query, key and value: the definition in plain torch.

Knows heads and tables of cosines, not how a checkpoint scales its angles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kernels.norm import rms_norm


def turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of [R, heads, D] by [R, 1, D], each product rounded as in transformers."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation of numbers that lie side by side, in the shapes of `turn_halves`.

    The firsts of all pairs come out before the seconds: a query and a key turned alike have the same product.
    """
    return turn_halves(torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1), cos, sin)


def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key normed a head (where weights are given) and turned to their positions; value as it is.

    Args:
        qkv: [R, (heads + 2 kv_heads) * D], rows contiguous.
        cos: [positions, D], qkv's dtype, both halves of D filled.
        sin: [positions, D].
        position: [R] int32 or int64, each below `positions`.
        heads: of the query.
        kv_heads: of key and of value.
        q_norm: [D] or None.
        k_norm: [D] or None.
        eps: of both norms.

    Returns:
        query [R, heads, D], key [R, kv_heads, D], value [R, kv_heads, D] (a view of qkv).
    """
    every = heads + 2 * kv_heads
    mixed = qkv.view(qkv.shape[0], every, qkv.shape[1] // every)
    query, key, value = mixed[:, :heads], mixed[:, heads:-kv_heads], mixed[:, -kv_heads:]
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    cos_row, sin_row = (table.index_select(0, position).unsqueeze(1) for table in (cos, sin))
    return turn_halves(query, cos_row, sin_row), turn_halves(key, cos_row, sin_row), value
