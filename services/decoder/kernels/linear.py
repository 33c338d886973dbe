"""Matrix products of a few rows with a layer's weights: the definition in plain torch.

Knows matrices, not what they project.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`: [R, K] x [N, K] (+ [N]) -> [R, N], one dtype, float32 sums."""
    return functional.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)`, each factor rounded to x's dtype: [R, K] -> [R, F].

    Args:
        x: [R, K].
        weight: [2F, K], the gate's rows, then the up projection's.
    """
    return swiglu(functional.linear(x, weight))


def swiglu(both: Tensor) -> Tensor:
    """`silu(gate) * up`, each factor rounded: [R, 2F], the gate's half first -> [R, F]."""
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up
