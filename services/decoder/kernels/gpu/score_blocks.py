"""MiniMax-M3's scores of blocks on the GPU: index queries against their rows' index keys; one launch.

The twin in kernels/choose_blocks.py is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WARPS = 4


class ScoreBlocksParams(ctypes.Structure):
    """As score_blocks.cu's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "pages", "seats", "length", "scores")),
        *((name, ctypes.c_int32) for name in ("queries", "blocks", "max_pages", "first", "pitch")),
    ]


@dataclass(frozen=True)
class ScoreBlocksShape:
    """What a variant is compiled for."""

    heads: int  # of a query, at most 32
    dim: int  # of a key
    block_tokens: int
    blocks_per_page: int
    top_k: int  # a query that sees no more blocks is not scored
    dtype: torch.dtype

    @property
    def defines(self) -> dict[str, int]:
        """The constants that score_blocks.cu's head asks for."""
        return {
            "HEADS": self.heads,
            "DIM": self.dim,
            "BLOCK_TOKENS": self.block_tokens,
            "BLOCKS_PER_PAGE": self.blocks_per_page,
            "TOP_K": self.top_k,
            "ELEMENT": _ELEMENTS[self.dtype],
            "WARPS": _WARPS,
        }

    @property
    def shared_bytes(self) -> int:
        """A query for each warp, in float32."""
        return 4 * _WARPS * self.heads * self.dim

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            "score_blocks",
            self.defines,
            threads=32 * _WARPS,
            cluster=1,
            shared_bytes=self.shared_bytes,
            overlaps=True,
        )

    @cached_property
    def thread_blocks(self) -> int:
        """As many as run at once; blocks to score are dealt out to their warps in turn."""
        return self.kernel.most_clusters()


@dataclass(frozen=True, slots=True)
class ScoreBlocksCall:
    """One launch; contiguous on the device, index tensors int32.

    In decode each query has a seat and a length; in prefill both are None, the queries are consecutive tokens
    of one row, and the first of them sees `first` + 1 tokens.
    """

    query: Tensor  # [queries, heads, dim]
    keys: Tensor  # [device pages, blocks a page, block_tokens, dim]
    pages: Tensor  # [table rows, max_pages], or [pages] of the one row
    seats: Tensor | None  # [queries]
    length: Tensor | None  # [queries] tokens that each query sees
    scores: (
        Tensor  # out, at least queries * heads * pitch elements; of queries that see more than top_k blocks
    )
    blocks: int  # that any query sees, at most
    first: int
    pitch: int  # elements from one head's scores to the next's

    def launch(self, shape: ScoreBlocksShape) -> None:
        """Launch on torch's current stream."""
        parameters = ScoreBlocksParams(
            query=self.query.data_ptr(),
            keys=self.keys.data_ptr(),
            pages=self.pages.data_ptr(),
            seats=None if self.seats is None else self.seats.data_ptr(),
            length=None if self.length is None else self.length.data_ptr(),
            scores=self.scores.data_ptr(),
            queries=self.query.shape[0],
            blocks=self.blocks,
            max_pages=self.pages.shape[-1],
            first=self.first,
            pitch=self.pitch,
        )
        shape.kernel.launch(shape.thread_blocks, parameters)

    def check(self, shape: ScoreBlocksShape) -> None:
        """Refuse what the kernel would read or write wrongly.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        queries = self.query.shape[0]
        if self.query.shape[1:] != (shape.heads, shape.dim) or self.query.dtype != shape.dtype or not queries:
            raise ValueError(f"query must be {shape.dtype} [queries, {shape.heads}, {shape.dim}]")
        wanted = (shape.blocks_per_page, shape.block_tokens, shape.dim)
        if self.keys.shape[1:] != wanted or self.keys.dtype != shape.dtype:
            raise ValueError(f"keys must be {shape.dtype} [pages, {', '.join(map(str, wanted))}]")
        if (self.seats is None) != (self.length is None) or self.pages.dim() != (
            2 if self.seats is not None else 1
        ):
            raise ValueError("seats and length come together, with pages of all rows, or not at all")
        for name in ("pages", "seats", "length", "scores"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
                raise ValueError(f"{name} must be contiguous int32")
        for name in ("query", "keys"):
            if not getattr(self, name).is_contiguous() or getattr(self, name).data_ptr() % 16:
                raise ValueError(f"{name} must be contiguous and begin at a multiple of 16 bytes")
        if self.blocks > self.pages.shape[-1] * shape.blocks_per_page:
            raise ValueError(f"pages hold fewer than {self.blocks} blocks")
        if self.pitch < self.blocks or self.scores.numel() < queries * shape.heads * self.pitch:
            raise ValueError(f"scores must be {queries} x {shape.heads} x {self.pitch} elements")
