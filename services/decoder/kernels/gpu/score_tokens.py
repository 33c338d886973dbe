"""DSA's scores on the GPU: queries against their rows' index keys; one launch.

The twin in kernels/choose_tokens.py (score_tokens) is the definition.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from services.decoder.kernels.gpu.kernel import Kernel
from services.decoder.kernels.index_code import TAIL_BYTES

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WARPS, _KEYS = 8, 32
_PLAIN_THREADS = 128


class ScoreParams(ctypes.Structure):
    """As token_items.cuh's struct, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "query", "weight", "entries", "pages", "seats", "length", "real_rows", "scores",
        )),
        *((name, ctypes.c_int32) for name in ("queries", "max_pages", "first", "pitch")),
    ]  # fmt: skip


@dataclass(frozen=True)
class ScoreShape:
    """What a variant is compiled for."""

    dim: int
    heads: int
    top_k: int  # a query that sees no more tokens is not scored
    page_tokens: int
    dtype: torch.dtype  # of the query
    coded: bool = False  # keys are kernels/index_code.py's, the query is their float16

    @property
    def entry_elements(self) -> int:
        """Of a key: bytes of a coded one."""
        return self.dim + TAIL_BYTES if self.coded else self.dim

    @property
    def products(self) -> bool:
        """Whether matrix products do it (score_tokens.cu); else plain multiply-adds."""
        whole = self.dim % 32 == 0 and self.heads % 16 == 0
        return self.dtype != torch.float32 and whole and self.heads * (2 * self.dim + 68) <= 48 * 1024

    @property
    def source(self) -> str:
        """Name of the kernel."""
        return "score_tokens" if self.products else "score_tokens_plain"

    @property
    def defines(self) -> dict[str, int]:
        """The constants that the source's head asks for."""
        own = {"WARPS": _WARPS, "KEYS": _KEYS} if self.products else {"THREADS": _PLAIN_THREADS}
        return {
            "DIM": self.dim,
            "HEADS": self.heads,
            "TOP_K": self.top_k,
            "PAGE_TOKENS": self.page_tokens,
            "ELEMENT": _ELEMENTS[self.dtype],
            "CODED": int(self.coded),
            **own,
        }

    @cached_property
    def kernel(self) -> Kernel:
        """Compiled and loaded at first use."""
        return Kernel(
            self.source,
            self.defines,
            threads=32 * _WARPS if self.products else _PLAIN_THREADS,
            cluster=1,
            shared_bytes=0 if self.products else 4 * self.heads * self.dim,
            overlaps=True,
        )

    @cached_property
    def thread_blocks(self) -> int:
        """As many as run at once; tiles are dealt out to them evenly."""
        return self.kernel.most_clusters()


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """One launch; contiguous on the device, index tensors int32.

    In decode each query has a seat and a length; in prefill both are None, the queries are consecutive tokens
    of one row, and the first of them sees `first` + 1 tokens.
    """

    query: Tensor  # [queries, heads, dim]
    weight: Tensor  # [queries, heads] float32
    entries: Tensor  # [device pages * page_tokens, dim], or uint8 [.., dim + TAIL_BYTES]
    pages: Tensor  # [table rows, max_pages], or [pages] of the one row
    seats: Tensor | None  # [queries]
    length: Tensor | None  # [queries] tokens that each query sees
    real_rows: Tensor | None  # [1]
    scores: Tensor  # out, at least queries * pitch elements; of queries that see more than top_k tokens
    first: int
    pitch: int  # elements from one query's scores to the next's, a multiple of 4

    def launch(self, shape: ScoreShape) -> None:
        """Launch on torch's current stream."""
        parameters = ScoreParams(
            query=self.query.data_ptr(),
            weight=self.weight.data_ptr(),
            entries=self.entries.data_ptr(),
            pages=self.pages.data_ptr(),
            seats=None if self.seats is None else self.seats.data_ptr(),
            length=None if self.length is None else self.length.data_ptr(),
            real_rows=None if self.real_rows is None else self.real_rows.data_ptr(),
            scores=self.scores.data_ptr(),
            queries=self.query.shape[0],
            max_pages=self.pages.shape[-1],
            first=self.first,
            pitch=self.pitch,
        )
        shape.kernel.launch(shape.thread_blocks, parameters)

    def check(self, shape: ScoreShape) -> None:
        """Refuse what the kernel would read wrongly.

        Raises:
            ValueError: a shape, dtype or layout that is off, by name.
        """
        queries = self.query.shape[0]
        if self.query.shape[1:] != (shape.heads, shape.dim) or self.query.dtype != shape.dtype or not queries:
            raise ValueError(f"query must be {shape.dtype} [queries, {shape.heads}, {shape.dim}]")
        if self.weight.shape != (queries, shape.heads) or self.weight.dtype != torch.float32:
            raise ValueError(f"weight must be [{queries}, {shape.heads}] float32")
        kept, wide = torch.uint8 if shape.coded else shape.dtype, shape.entry_elements
        if self.entries.shape[1:] != (wide,) or self.entries.dtype != kept:
            raise ValueError(f"entries must be {kept} [device pages * page_tokens, {wide}]")
        if shape.coded and shape.dtype != torch.float16:
            raise ValueError(f"query must be float16 beside coded entries, is {shape.dtype}")
        given = [tensor is not None for tensor in (self.seats, self.length, self.real_rows)]
        if any(given) != all(given) or self.pages.dim() != (2 if any(given) else 1):
            raise ValueError(
                "seats, length and real_rows come together, with pages of all rows, or not at all"
            )
        for name in ("pages", "seats", "length", "real_rows", "scores"):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous()):
                raise ValueError(f"{name} must be contiguous int32")
        if not self.weight.is_contiguous():
            raise ValueError("weight must be contiguous")
        for name in ("query", "entries"):
            tensor = getattr(self, name)
            assert tensor is not None
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(f"{name} must be contiguous and begin at a multiple of 16 bytes")
        seen = self.pages.shape[-1] * shape.page_tokens if self.length is not None else self.first + queries
        if seen > self.pages.shape[-1] * shape.page_tokens:
            raise ValueError(f"pages hold fewer than the {seen} tokens that are seen")
        if self.pitch % 4 or self.pitch < seen or self.scores.numel() < queries * self.pitch:
            raise ValueError(f"scores must be {queries} x {self.pitch} elements, for {seen} tokens each")
