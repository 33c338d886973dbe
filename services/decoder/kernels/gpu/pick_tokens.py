"""The exact top-k of scored tokens on the GPU; one launch, a thread block a query.

The twin in kernels/choose_tokens.py is the definition. The set is the twin's; the order is ascending here,
so a function of the scores alone, with -1 behind where a query sees fewer tokens.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

_THREADS = 512


class PickParams(ctypes.Structure):
    """As pick_tokens.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "length", "real_rows", "chosen")),
        *((name, ctypes.c_int32) for name in ("first", "pitch", "width")),
    ]


@dataclass(frozen=True)
class PickShape:
    """What a variant is compiled for."""

    top_k: int

    @property
    def defines(self) -> dict[str, int]:
        """The constants that pick_tokens.cu's head asks for."""
        return {"TOP_K": self.top_k, "THREADS": _THREADS}

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("pick_tokens", self.defines, threads=_THREADS, cluster=1, shared_bytes=0, overlaps=True)


@dataclass(frozen=True, slots=True)
class PickCall:
    """One launch behind score_tokens, whose queries, lengths and scores are meant here too."""

    scores: Tensor  # at least queries * pitch elements, int32
    length: Tensor | None  # [queries] int32; None: query i sees first + i + 1 tokens
    real_rows: Tensor | None  # [1] int32; None: all are real
    chosen: Tensor  # out [queries, width] int32; padding is left alone
    first: int
    pitch: int

    def launch(self, shape: PickShape) -> None:
        """Launch on torch's current stream."""
        parameters = PickParams(
            scores=self.scores.data_ptr(),
            length=None if self.length is None else self.length.data_ptr(),
            real_rows=None if self.real_rows is None else self.real_rows.data_ptr(),
            chosen=self.chosen.data_ptr(),
            first=self.first,
            pitch=self.pitch,
            width=self.chosen.shape[1],
        )
        shape.kernel.launch(self.chosen.shape[0], parameters)

    def check(self, shape: PickShape) -> None:
        """Refuse what the kernel would read or write wrongly.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        for name in ("scores", "length", "real_rows", "chosen"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
                raise ValueError(f"{name} must be contiguous int32")
        queries, width = self.chosen.shape
        least = shape.top_k if self.length is not None else min(shape.top_k, self.first + queries)
        if not least <= width <= shape.top_k:
            raise ValueError(f"chosen must be [{queries}, {shape.top_k}], or as wide as the last query sees")
        if self.length is not None and self.length.shape != (queries,):
            raise ValueError(f"length must be [{queries}]")
        if self.pitch % 4 or self.scores.data_ptr() % 16 or self.scores.numel() < queries * self.pitch:
            raise ValueError(f"scores must be {queries} x {self.pitch} aligned elements")
