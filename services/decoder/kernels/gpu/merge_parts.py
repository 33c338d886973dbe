"""merge_parts on the GPU: one launch a window of prefill's history.

The twin in kernels/attend_part.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch

from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.gpu.kernel import Kernel

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_THREADS = 256


class MergePartsParams(ctypes.Structure):
    """As merge_parts.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "first", "second", "first_lse", "second_lse", "out", "out_lse",
        )),
        *((name, ctypes.c_int64) for name in (
            "first_token", "first_head", "second_token", "second_head",
            "first_lse_token", "first_lse_head", "second_lse_token", "second_lse_head",
        )),
        ("tokens", ctypes.c_uint32),
        ("heads", ctypes.c_uint32),
    ]  # fmt: skip


@dataclass(frozen=True)
class MergePartsShape:
    """What a variant is compiled for."""

    head_dim: int  # a multiple of 8
    dtype: torch.dtype  # of the second part
    first_wide: bool  # the first part is float32
    out_wide: bool  # so is the result

    @property
    def defines(self) -> dict[str, int]:
        """The constants that merge_parts.cu's head asks for."""
        return {
            "HEAD_DIM": self.head_dim,
            "ELEMENT": _ELEMENTS[self.dtype],
            "FIRST_WIDE": int(self.first_wide),
            "OUT_WIDE": int(self.out_wide),
            "THREADS": _THREADS,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("merge_parts", self.defines, threads=_THREADS, cluster=1, shared_bytes=0)


@dataclass(frozen=True, slots=True)
class MergePartsCall:
    """One launch."""

    first: Part  # float32, or of the second's dtype
    second: Part
    out: Part  # contiguous

    def launch(self, shape: MergePartsShape) -> None:
        """Launch on torch's current stream."""
        tokens, heads, _ = self.out.out.shape
        strides = [
            stride
            for side in ("out", "lse")
            for part in (self.first, self.second)
            for stride in getattr(part, side).stride()[:2]
        ]
        pointers = [
            getattr(part, side).data_ptr() for side in ("out", "lse") for part in (self.first, self.second)
        ]
        parameters = MergePartsParams(
            *pointers, self.out.out.data_ptr(), self.out.lse.data_ptr(), *strides, tokens, heads
        )
        threads = tokens * heads * shape.head_dim // 8
        shape.kernel.launch(-(-threads // _THREADS), parameters)

    def check(self, shape: MergePartsShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        size = self.out.out.shape
        for name in ("first", "second", "out"):
            part: Part = getattr(self, name)
            if part.out.shape != size or part.lse.shape != size[:2] or size[2] != shape.head_dim:
                raise ValueError(f"{name} must be {list(size)} with sums of {list(size[:2])}")
            wide = {"first": shape.first_wide, "second": False, "out": shape.out_wide}[name]
            if part.out.dtype != (torch.float32 if wide else shape.dtype) or part.lse.dtype != torch.float32:
                raise ValueError(f"{name} is {part.out.dtype} with sums of {part.lse.dtype}")
            step = 16 // part.out.element_size()
            ends = part.out.data_ptr() % 16 or part.out.stride(0) % step or part.out.stride(1) % step
            if part.out.stride(2) != 1 or ends:
                raise ValueError(f"{name}'s heads must be contiguous and begin at multiples of 16 bytes")
        if not self.out.out.is_contiguous() or not self.out.lse.is_contiguous():
            raise ValueError("out must be contiguous")


def merged(first: Part, second: Part, dtype: torch.dtype) -> MergePartsCall:
    """The call for two parts, its result still to be computed."""
    out = torch.empty(second.out.shape, dtype=dtype, device=second.out.device)
    return MergePartsCall(first, second, Part(out, second.lse.new_empty(second.out.shape[:2])))


def shape_of(call: MergePartsCall) -> MergePartsShape:
    """The variant for a call."""
    dtype, wide = call.second.out.dtype, torch.float32
    return MergePartsShape(
        head_dim=call.out.out.shape[2],
        dtype=dtype,
        first_wide=call.first.out.dtype == wide != dtype,
        out_wide=call.out.out.dtype == wide != dtype,
    )
