"""Index keys and queries of DSA in eight bits: turned by a Hadamard matrix, then e4m3 with a scale each.

The rotation keeps dot products and spreads outliers over all numbers, so that one scale a vector does; this
is how DeepSeek-V3.2 serves its indexer. A coded key is its numbers, then its scale as a float32, then padding
to 16 bytes. Eight-bit numbers are exact in float16, so products with them are those of the codes.

Knows vectors; not where they lie.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TAIL_BYTES = 16
"""Of a coded key, behind its numbers: the scale, and padding."""
_MOST = 448.0  # the largest e4m3


def hadamard(size: int, device: torch.device) -> Tensor:
    """[size, size] float32, orthogonal and symmetric.

    Raises:
        ValueError: `size` is no power of two.
    """
    if size & (size - 1) or size < 1:
        raise ValueError(f"no Hadamard matrix of {size} x {size} is made here")
    made = torch.ones(1, 1, device=device)
    while made.shape[0] < size:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made / math.sqrt(size)


def coded(vectors: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """[..., size] -> their numbers [..., size] float8_e4m3fn, and the scales [...] float32 that undo it."""
    turned = vectors.float() @ rotation
    scale = turned.abs().amax(-1).clamp_min(1e-12) / _MOST
    return (turned / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def code_keys(keys: Tensor, rotation: Tensor) -> Tensor:
    """[n, size] -> [n, size + TAIL_BYTES] uint8."""
    numbers, scale = coded(keys, rotation)
    tail = torch.zeros(keys.shape[0], TAIL_BYTES, dtype=torch.uint8, device=keys.device)
    tail[:, :4] = scale.unsqueeze(1).view(torch.uint8)
    return torch.cat([numbers.view(torch.uint8), tail], 1)


def decode_keys(entries: Tensor) -> Tensor:
    """[n, size + TAIL_BYTES] uint8 -> [n, size] float32, still turned."""
    size = entries.shape[1] - TAIL_BYTES
    scale = entries[:, size : size + 4].contiguous().view(torch.float32)
    return entries[:, :size].view(torch.float8_e4m3fn).float() * scale


def code_query(query: Tensor, weight: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """[T, heads, size] and [T, heads] -> the numbers as float16, and weights that took their scales in."""
    numbers, scale = coded(query, rotation)
    return numbers.half(), weight * scale
