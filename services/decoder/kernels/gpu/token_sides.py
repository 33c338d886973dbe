"""Keys and values of new tokens, as kernels that write records are given them."""

from __future__ import annotations

import torch
from torch import Tensor


def whole_tokens(side: Tensor) -> Tensor:
    """[tokens, heads, head_dim] with a token's heads side by side; transformers lays them apart."""
    whole = side.stride()[1:] == (side.shape[2], 1)
    return side if whole else side.clone(memory_format=torch.contiguous_format)


def sides_of(value: Tensor) -> int:
    """How many a record has: values `[tokens, heads, head_dim]` without numbers are none."""
    return 2 if value.shape[2] else 1
