"""Dense attention of a run of queries over one part of what they may see, and how parts become a whole.

Knows positions only in so far as a part is seen entirely, or causally by queries that stand at its own
positions. A part's softmax is over that part alone; the logarithm of its sum says what it weighs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EVEN = (512, 2048)
"""Tokens and, where more are seen, keys. cuDNN plans each pair of lengths anew, for 50 ms; so it gets only
lengths that come back, those that long chunks and windows are cut to. It is 1.9 times as fast as torch's
flash attention (675 against 358 TFLOP/s, 4,096 tokens over 16,384, H200, torch 2.11)."""


class Part(NamedTuple):
    """What queries made of the keys and values of one part."""

    out: Tensor  # [tokens, query heads, head_dim], each head's numbers side by side
    lse: Tensor  # [tokens, query heads] float32: log of the sum of exp(scaled q.k)


def attend_part(query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool) -> Part:
    """Attention over one part.

    Args:
        query: [tokens, query heads, head_dim].
        key: [n, kv_heads, head_dim], n > 0, each head's numbers side by side.
        value: the same shape.
        scaling: factor on q.k.
        causal: query i sees keys 0 to i, of n = tokens; else every query sees every key.
    """
    if query.device.type == "cpu":
        heads_first = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = attend(*heads_first, 0.0, causal, scale=scaling)
        return Part(out[0].transpose(0, 1), lse[0].t())
    if query.dtype == torch.float32 or query.shape[2] % 8 or query.shape[2] > 256:
        return _attend_any_dtype(query, key, value, scaling, causal=causal)
    heads_first = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    if _cudnn_takes(query, key):
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = attend(*heads_first, None, True, 0.0, causal, False, scale=scaling)
        return Part(out[0].transpose(0, 1), lse.view(lse.shape[1:3]).t())
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = attend(*heads_first, 0.0, causal, False, scale=scaling)
    return Part(out[0].transpose(0, 1), lse[0].t())


def merge_parts(first: Part, second: Part, dtype: torch.dtype) -> Part:
    """Both parts as one, computed in float32; its `out` in `dtype`, contiguous."""
    lse = torch.logaddexp(first.lse, second.lse)
    out = sum(part.out.float() * (part.lse - lse).exp().unsqueeze(2) for part in (first, second))
    assert isinstance(out, Tensor)
    return Part(out.to(dtype), lse)


def _cudnn_takes(query: Tensor, key: Tensor) -> bool:
    return (
        query.shape[0] % _EVEN[0] == 0
        and (key.shape[0] == query.shape[0] or key.shape[0] % _EVEN[1] == 0)
        and query.shape[2] <= 128
        and torch.cuda.get_device_capability(query.device) >= (9, 0)
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    )


def _attend_any_dtype(query: Tensor, key: Tensor, value: Tensor, scaling: float, *, causal: bool) -> Part:
    """KV heads stand where torch expects a batch, each seen by all its query heads: nothing is repeated."""
    tokens, kv_heads = query.shape[0], key.shape[1]
    shared_key, shared_value = (
        part.transpose(0, 1).unsqueeze(1).expand(-1, query.shape[1] // kv_heads, -1, -1)
        for part in (key, value)
    )
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = attend(
        query.reshape(tokens, kv_heads, -1, query.shape[2]).permute(1, 2, 0, 3),
        shared_key,
        shared_value,
        None,
        True,
        0.0,
        causal,
        scale=scaling,
    )
    return Part(out.flatten(0, 1).transpose(0, 1), lse[:, :, :tokens].flatten(0, 1).t())
