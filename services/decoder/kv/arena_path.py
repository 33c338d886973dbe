"""How prefill's bytes get into the arena and come back: at once where it is the device's own memory.

Knows records and pages; not what attention makes of them. streamed_path.py is the way to a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.history import KeysValues, Window, window_runs
from services.decoder.kv.shape import KvShape


class ArenaPath(Protocol):
    """One engine's. Calls come from its loop alone: begin, then layer after layer, then finish."""

    def begin(self, chunks: Sequence[PrefillChunk], *, reads: bool) -> None:
        """A step with these chunks begins; everything written before is in the arena, or on its way there.

        With `reads`, `windows` will be called for every layer and chunk, in this order.
        """

    def write(self, layer: int, chunk: PrefillChunk, key: Tensor, value: Tensor) -> None:
        """Write a chunk's records from its `[tokens, kv_heads, head_dim]` keys and values."""

    def windows(self, layer: int, chunk: PrefillChunk) -> Iterator[KeysValues]:
        """What came before the chunk; each window is there until the next one is asked for."""

    def finish(self) -> None:
        """The step's layers are done: what the device does next comes after all of its writes and reads."""


class DirectPath:
    """The arena is ordinary memory: a copy is a copy."""

    def __init__(
        self, kernels: StepKernels, arena: ArenaMap, shape: KvShape, window_tokens: int, device: torch.device
    ) -> None:
        self._kernels = kernels
        self._shape = shape
        self._arena = [arena.kv_blocks(layer) for layer in range(shape.layers)]
        self._window = Window(kernels, shape, window_tokens, device)

    def begin(self, chunks: Sequence[PrefillChunk], *, reads: bool) -> None:
        """Nothing to prepare."""

    def write(self, layer: int, chunk: PrefillChunk, key: Tensor, value: Tensor) -> None:
        """To their places."""
        first_page, first = divmod(chunk.start, self._shape.page_tokens)
        pages = chunk.host_pages[first_page:]
        self._kernels.write_run(key, value, self._shape.as_pages(self._arena[layer]), pages, first)

    def windows(self, layer: int, chunk: PrefillChunk) -> Iterator[KeysValues]:
        """Gathered from their places."""
        for start, end in window_runs(chunk.start, self._window.tokens):
            pages = chunk.host_pages[start // self._shape.page_tokens : self._shape.pages_for(end)]
            yield self._window.gather(self._arena[layer], pages, end - start)

    def finish(self) -> None:
        """Nothing is under way."""
