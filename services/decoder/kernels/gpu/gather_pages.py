"""gather_pages on the GPU: one launch a window.

The twin in kernels/gather_pages.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

_THREADS = 256
_DEPTH = 4


class GatherPagesParams(ctypes.Structure):
    """As gather_pages.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("source", "pages", "out")),
        ("count", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class GatherPagesShape:
    """What a variant is compiled for."""

    groups: int
    group_bytes: int  # of one group in a page

    @property
    def defines(self) -> dict[str, int]:
        """The constants that gather_pages.cu's head asks for."""
        return {
            "GROUPS": self.groups,
            "GROUP_BYTES": self.group_bytes,
            "THREADS": _THREADS,
            "DEPTH": _DEPTH,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("gather_pages", self.defines, threads=_THREADS, cluster=1, shared_bytes=0)


@dataclass(frozen=True, slots=True)
class GatherPagesCall:
    """One launch; everything contiguous, `source` perhaps in host memory that the device addresses."""

    source: Tensor  # [all pages, groups, page_tokens, record elements]
    pages: Tensor  # [n] int32
    out: Tensor  # [groups, n * page_tokens, record elements]

    def launch(self, shape: GatherPagesShape) -> None:
        """Launch on torch's current stream."""
        count = self.pages.shape[0]
        parameters = GatherPagesParams(
            source=self.source.data_ptr(),
            pages=self.pages.data_ptr(),
            out=self.out.data_ptr(),
            count=count,
        )
        pieces = shape.groups * count * shape.group_bytes // 16
        shape.kernel.launch(-(-pieces // (_THREADS * _DEPTH)), parameters)

    def check(self, shape: GatherPagesShape) -> None:
        """Refuse what the kernel would read wrongly; once, before the first launch.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        if self.pages.dtype != torch.int32 or self.pages.dim() != 1 or self.pages.shape[0] < 1:
            raise ValueError("pages must be [n] int32, n > 0")
        of_group = self.source[0, 0].numel() * self.source.element_size()
        if of_group != shape.group_bytes or of_group % 16:
            raise ValueError(f"a group of a page must be {shape.group_bytes} bytes, is {of_group}")
        wanted = (shape.groups, self.pages.shape[0] * self.source.shape[2], self.source.shape[3])
        if self.out.shape != wanted or self.out.dtype != self.source.dtype:
            raise ValueError(f"out must be {self.source.dtype} {list(wanted)}")
        for name in ("source", "pages", "out"):
            tensor: Tensor = getattr(self, name)
            if not tensor.is_contiguous() or tensor.device.type != "cuda":
                raise ValueError(f"{name} must be contiguous on the GPU")
        if self.source.data_ptr() % 16 or self.out.data_ptr() % 16:
            raise ValueError("source and out must begin at multiples of 16 bytes")
