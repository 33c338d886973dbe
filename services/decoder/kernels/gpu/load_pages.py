"""load_pages on the GPU: one launch for all layers.

The twin in kernels/load_pages.py is the definition.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.upload import upload

BLOCKS = 4
"""Thread blocks of a launch. Beside decode of 8 rows of 32K on an H200 they move 44 GB/s, and steps take 8 %
longer; two move 33 GB/s for 6 %. With six, steps take 45 % longer: grids of 128 thread blocks, which cuBLAS
likes, do not fit beside them any more. Alone, two fill the link."""
_THREADS = 512
_DEPTH = 8


class LoadPagesParams(ctypes.Structure):
    """As load_pages.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "pages")),
        *((name, ctypes.c_int32) for name in ("layer_count", "page_count")),
    ]


@dataclass(frozen=True)
class LoadPagesShape:
    """What a variant is compiled for."""

    page_bytes: int  # of one layer, a multiple of 16

    @property
    def defines(self) -> dict[str, int]:
        """The constants that load_pages.cu's head asks for."""
        return {"PAGE_BYTES": self.page_bytes, "THREADS": _THREADS, "DEPTH": _DEPTH}

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel("load_pages", self.defines, threads=_THREADS, cluster=1, shared_bytes=0)


@dataclass(frozen=True, slots=True)
class LoadPagesCall:
    """One launch."""

    sources: Sequence[Tensor]  # [host pages, page elements] a layer, in host memory that the device addresses
    targets: Sequence[Tensor]  # [device pages, page elements] a layer
    pages: Tensor  # [2, n] int64

    def launch(self, shape: LoadPagesShape) -> None:
        """Launch on torch's current stream."""
        addresses = [[layer.data_ptr() for layer in side] for side in (self.sources, self.targets)]
        layers = upload(addresses, self.pages.device)
        parameters = LoadPagesParams(
            layers=layers.data_ptr(),
            pages=self.pages.data_ptr(),
            layer_count=len(self.sources),
            page_count=self.pages.shape[1],
        )
        shape.kernel.launch(BLOCKS, parameters)

    def check(self, shape: LoadPagesShape) -> None:
        """Refuse what the kernel would read wrongly.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        if len(self.sources) != len(self.targets) or not self.sources:
            raise ValueError(f"{len(self.sources)} layers of sources, {len(self.targets)} of targets")
        if self.pages.dtype != torch.int64 or self.pages.dim() != 2 or self.pages.shape[0] != 2:
            raise ValueError("pages must be [2, n] int64")
        if not self.pages.is_contiguous() or self.pages.device.type != "cuda":
            raise ValueError("pages must be contiguous on the GPU")
        if shape.page_bytes % 16:
            raise ValueError(f"a page must be a multiple of 16 bytes, is {shape.page_bytes}")
        for layer in (*self.sources, *self.targets):
            page_bytes = layer.shape[1] * layer.element_size()
            if page_bytes != shape.page_bytes:
                raise ValueError(f"a page must be {shape.page_bytes} bytes, is {page_bytes}")
            if not layer.is_contiguous() or layer.device.type != "cuda" or layer.data_ptr() % 16:
                raise ValueError("layers must be contiguous on the GPU and begin at multiples of 16 bytes")
