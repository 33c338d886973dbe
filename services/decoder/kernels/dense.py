"""What a decode step computes between attentions, as one plug point: norms, projections, rotary positions.

Knows tensors only. `TorchDense` is the definition and runs on any device; kernels/gpu/dense.py is fast.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.decoder.kernels import linear, norm, rope


class DenseOps(Protocol):
    """Dense operations over R rows, one dtype throughout.

    Nothing is written in place; results are the caller's. A view among the results (rotate's value) lives as
    long as its input. No method waits for the device, so all may be captured in a CUDA graph. Arguments are
    not checked here beyond what torch refuses; models pass what they were built with.
    """

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of [R, H] by `weight` [H], in float32, rounded, then times the weight."""
        ...

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`x + delta` [R, H] in x's dtype (the residual stream), and its RMSNorm."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[R, K] by `weight` [N, K], plus `bias` [N] -> [R, N]."""
        ...

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        """[R, K] by `weight` [2F, K], the gate's rows then the up projection's -> silu(gate) * up [R, F]."""
        ...

    def rotate(
        self,
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
        """Split, norm by head (where weights [D] are given) and turn by half-split rotary positions.

        Args:
            qkv: [R, (heads + 2 kv_heads) * D].
            cos: [positions, D], both halves of D filled, as transformers makes them.
            sin: [positions, D].
            position: [R] int32 or int64, each below `positions`.
            heads: of the query.
            kv_heads: of key and of value.
            q_norm: [D] or None.
            k_norm: [D] or None.
            eps: of both norms.

        Returns:
            query [R, heads, D], key [R, kv_heads, D], value [R, kv_heads, D], which may be a view of qkv.
        """
        ...


class TorchDense:
    """The twin of every dense kernel, in plain torch."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, delta, weight, eps)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear.gated_linear(x, weight)

    def rotate(
        self,
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
        return rope.rotate(qkv, cos, sin, position, heads, kv_heads, q_norm, k_norm, eps)
