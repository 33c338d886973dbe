"""The dense operations of a decode step on the GPU: fast kernels where they apply, torch for everything else.

The twin in kernels/dense.py is the definition. Knows which kernel takes what; holds the variants compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.decoder.kernels.dense import TorchDense
from services.decoder.kernels.gpu.linear import LinearCall, LinearShape
from services.decoder.kernels.gpu.norm import ELEMENTS, NormCall, NormShape
from services.decoder.kernels.gpu.rope import RopeCall, RopeShape
from services.decoder.kernels.gpu.swiglu import SwigluCall, SwigluShape
from services.decoder.kernels.linear import swiglu


def _takes(*tensors: Tensor | None) -> bool:
    """Whether all are of one 16-bit dtype on the GPU, contiguous, not empty and begin at 16 bytes."""
    given = [tensor for tensor in tensors if tensor is not None]
    dtype = given[0].dtype
    return dtype in ELEMENTS and all(
        tensor.dtype == dtype
        and tensor.is_cuda
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.data_ptr() % 16 == 0
        for tensor in given
    )


class GpuDense:
    """`DenseOps` of one device. Results are torch's allocations; launches go to torch's current stream."""

    def __init__(self) -> None:
        self._twin = TorchDense()
        self._norms: dict[NormShape, NormShape] = {}
        self._ropes: dict[RopeShape, RopeShape] = {}
        self._swiglus: dict[SwigluShape, SwigluShape] = {}
        self._linears: dict[tuple[int, int, int, bool, torch.dtype], LinearShape | None] = {}

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dim() != 2 or not NormShape.takes(x.shape[1]) or not _takes(x, weight):
            return self._twin.norm(x, weight, eps)
        out = torch.empty_like(x)
        NormCall(x, None, weight, None, out, eps).launch(self._norm_shape(x))
        return out

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dim() != 2 or not NormShape.takes(x.shape[1]) or not _takes(x, delta, weight):
            return self._twin.add_norm(x, delta, weight, eps)
        total, out = torch.empty_like(x), torch.empty_like(x)
        NormCall(x, delta, weight, total, out, eps).launch(self._norm_shape(x))
        return total, out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = self._linear_shape(x, weight, bias, gated=False)
        if shape is None:
            return self._twin.linear(x, weight, bias)
        out = x.new_empty(x.shape[0], weight.shape[0])
        LinearCall(x, weight, bias, out).launch(shape)
        return out

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        shape = self._linear_shape(x, weight, None, gated=True)
        if shape is None:
            return self._swiglu(self._twin.linear(x, weight, None))
        out = x.new_empty(x.shape[0], weight.shape[0] // 2)
        LinearCall(x, weight, None, out).launch(shape)
        return out

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
        rows, every = qkv.shape[0], heads + 2 * kv_heads
        shape = RopeShape(qkv.shape[1] // every, qkv.dtype)
        if not RopeShape.takes(shape.head_dim) or not _takes(qkv, cos, sin, q_norm, k_norm):
            return self._twin.rotate(qkv, cos, sin, position, heads, kv_heads, q_norm, k_norm, eps)
        query = qkv.new_empty(rows, heads, shape.head_dim)
        key = qkv.new_empty(rows, kv_heads, shape.head_dim)
        call = RopeCall(qkv, cos, sin, position, q_norm, k_norm, query, key, eps)
        call.launch(self._ropes.setdefault(shape, shape))
        return query, key, qkv.view(rows, every, shape.head_dim)[:, heads + kv_heads :]

    def _swiglu(self, both: Tensor) -> Tensor:
        if both.dim() != 2 or both.shape[1] % 16 or not _takes(both):
            return swiglu(both)
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        shape = SwigluShape(both.dtype)
        SwigluCall(both, out).launch(self._swiglus.setdefault(shape, shape))
        return out

    def _norm_shape(self, x: Tensor) -> NormShape:
        shape = NormShape(x.shape[1], x.dtype)
        return self._norms.setdefault(shape, shape)

    def _linear_shape(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool
    ) -> LinearShape | None:
        """The variant for this product; None where torch has to, or is faster."""
        if x.dim() != 2 or not _takes(x, weight, bias):
            return None
        features = weight.shape[0] // 2 if gated else weight.shape[0]
        key = (x.shape[0], features, x.shape[1], gated, x.dtype)
        if key not in self._linears:
            shape = LinearShape.fitting(*key)
            equal = next((known for known in self._linears.values() if known == shape), shape)
            self._linears[key] = equal  # so that each variant is loaded once
        return self._linears[key]
