"""RMSNorm, alone and behind the residual sum: the definition in plain torch.

Knows rows of numbers, not which layer they pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` over its root mean square, times `weight`.

    As transformers computes it: in float32, rounded to x's dtype, then multiplied by the weight.

    Args:
        x: [..., size].
        weight: [size], x's dtype.
        eps: added to the mean square.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + delta`, rounded to their dtype, and its norm.

    Args:
        x: [..., size], the residual stream.
        delta: like x, what a sublayer adds to it.
        weight: [size], their dtype.
        eps: added to the mean square.
    """
    total = x + delta
    return total, rms_norm(total, weight, eps)
