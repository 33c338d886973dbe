"""A layer's dense operations on a GPU, against the time its weights need to come from memory.

    python -m benchmarks.linear

One captured graph runs the layers of Qwen3-8B's shape, each with weights of its own, attention replaced by a
copy: with our kernels, with torch's products (cuBLAS) and our small kernels, beside the floor.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.gpu_timing import seconds_of
from services.decoder.kernels.dense import DenseOps, TorchDense
from services.decoder.kernels.gpu.dense import GpuDense
from services.decoder.kernels.gpu.kernel import Kernel

TB_S = 4.26  # bytes read and written per second of a large device copy on an H200, in 1e12
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, EPS = 4096, 12288, 32, 8, 128, 1e-6
ROWS = (1, 2, 4, 8, 16, 32, 64)
_COPY_THREADS = 128


class CopyParams(ctypes.Structure):
    """As copy.cu's struct."""

    _fields_ = [("from_", ctypes.c_void_p), ("to", ctypes.c_void_p), ("pieces", ctypes.c_int32)]


@cache
def copy_kernel() -> Kernel:
    """What stands for attention."""
    return Kernel(
        "copy",
        {"THREADS": _COPY_THREADS},
        threads=_COPY_THREADS,
        cluster=1,
        shared_bytes=0,
        overlaps=True,
        folder=Path(__file__).parent,
    )


def copied(x: Tensor) -> Tensor:
    """A copy of `x`, [R, HIDDEN]."""
    out = x.new_empty(x.shape[0], HIDDEN)
    pieces = x.numel() * x.element_size() // 16
    copy_kernel().launch(-(-pieces // _COPY_THREADS), CopyParams(x.data_ptr(), out.data_ptr(), pieces))
    return out


class Layer:
    """The weights of one layer."""

    def __init__(self, generator: torch.Generator) -> None:
        def made(*size: int) -> Tensor:
            numbers = torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
            return numbers.mul_(size[-1] ** -0.5) if len(size) > 1 else numbers.mul_(0.1).add_(1)

        self.qkv = made((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        self.out = made(HIDDEN, HIDDEN)
        self.gate_up = made(2 * INNER, HIDDEN)
        self.down = made(HIDDEN, INNER)
        self.norms = [made(HIDDEN) for _ in range(2)]
        self.q_norm, self.k_norm = made(HEAD_DIM), made(HEAD_DIM)

    def weight_bytes(self) -> int:
        """Of the four matrices."""
        return sum(each.numel() * 2 for each in (self.qkv, self.out, self.gate_up, self.down))


class Chain:
    """Layers one after the other over the same few rows."""

    def __init__(self, layers: list[Layer], rows: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(rows)
        self.layers = layers
        self.x = torch.randn(rows, HIDDEN, generator=generator, device="cuda", dtype=torch.bfloat16)
        self.position = torch.randint(0, 4096, (rows,), generator=generator, device="cuda")
        angle = torch.rand(4096, HEAD_DIM // 2, generator=generator, device="cuda").repeat(1, 2) * 6
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def run(self, ops: DenseOps) -> Tensor:
        """The last layer's residual stream."""
        total, x = self.x, ops.norm(self.x, self.layers[0].norms[0], EPS)
        for layer in self.layers:
            qkv = ops.linear(x, layer.qkv, None)
            turned = ops.rotate(
                qkv, self.cos, self.sin, self.position, HEADS, KV_HEADS, layer.q_norm, layer.k_norm, EPS
            )
            out = ops.linear(copied(turned[0]), layer.out, None)
            total, x = ops.add_norm(total, out, layer.norms[1], EPS)
            down = ops.linear(ops.gated(x, layer.gate_up), layer.down, None)
            total, x = ops.add_norm(total, down, layer.norms[0], EPS)
        return total

    def us_per_layer(self, ops: DenseOps) -> float:
        """Of one captured graph."""
        self.run(ops)  # compiles, and lets cuBLAS allocate
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(ops)
        return seconds_of(graph.replay, lambda: None, 20) / len(self.layers) * 1e6


class TorchProducts(GpuDense):
    """Our small kernels around torch's matrix products."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return TorchDense().linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor:
        return TorchDense().gated(x, weight)


def main() -> None:
    """Measure, print, write JSON."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    layers = [Layer(generator) for _ in range(36)]
    floor = layers[0].weight_bytes() / TB_S / 1e6
    print(f"floor {floor:.1f} us a layer: {layers[0].weight_bytes() / 1e6:.0f} MB at {TB_S} TB/s")
    print("rows     ours  x floor   torch  x floor    error")
    rows: list[dict[str, Any]] = []
    for size in ROWS:
        chain = Chain(layers, size)
        ours, theirs = chain.us_per_layer(GpuDense()), chain.us_per_layer(TorchProducts())
        expected = chain.run(TorchDense())
        error = float((chain.run(GpuDense()).float() - expected.float()).norm() / expected.float().norm())
        rows.append(
            {"rows": size, "us": round(ours, 2), "torch_us": round(theirs, 2), "error": round(error, 5)}
        )
        print(
            f"{size:>4}{ours:>9.1f}{ours / floor:>9.3f}{theirs:>8.1f}{theirs / floor:>9.3f}{error:>9.5f}",
            flush=True,
        )
    report.write(
        "linear",
        report.gpu()
        | {
            "model": "qwen3-8b",
            "layers": len(layers),
            "floor_us": round(floor, 2),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
