"""Prefill's way to an arena that this engine cannot map: pages are asked for, a window at a time.

Knows records and pages; not what attention makes of them. What is written is staged, and gets there with the
rest of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.history import KeysValues, Window, window_runs
from services.decoder.kv.page_bytes import page_pieces
from services.decoder.kv.remote_arena import RemoteArena
from services.decoder.kv.shape import KvShape


class RemotePath:
    """An ArenaPath for a device whose memory is the host's."""

    def __init__(
        self,
        kernels: StepKernels,
        arena: RemoteArena,
        shape: KvShape,
        window_tokens: int,
        device: torch.device,
    ) -> None:
        self._kernels = kernels
        self._arena = arena
        self._shape = shape
        self._window = Window(kernels, shape, window_tokens, device)

    def begin(self, chunks: Sequence[PrefillChunk], *, reads: bool) -> None:
        """Nothing to prepare."""

    def write(self, layer: int, chunk: PrefillChunk, key: Tensor, value: Tensor) -> None:
        """Stage the records, as pages first and then what of these is new."""
        shape = self._shape
        first_page, first = divmod(chunk.start, shape.page_tokens)
        pages = chunk.arena_pages[first_page : shape.pages_for(chunk.end)].tolist()
        staged = torch.zeros(len(pages) * shape.page_elements, dtype=shape.record_dtype)
        numbers = torch.arange(len(pages), dtype=torch.int32)
        self._kernels.write_run(key, value, shape.as_pages(staged), numbers, first)
        page_bytes = shape.page_elements * shape.record_dtype.itemsize
        packed = staged.view(torch.uint8)
        for place in range(len(pages)):  # a piece lies in one page
            of_page = packed[place * page_bytes : (place + 1) * page_bytes]
            begin = max(0, first - place * shape.page_tokens)
            end = min(shape.page_tokens, first + chunk.end - chunk.start - place * shape.page_tokens)
            own = page_pieces(shape, [0], begin, end - begin)
            offsets, size = np.array([piece.arena for piece in own]), own[0].size
            pieces = self._arena.pieces("kv", layer, np.full(len(own), pages[place]), offsets, size)
            self._arena.stage(pieces, torch.cat([of_page[at : at + size] for at in offsets.tolist()]))

    def windows(self, layer: int, chunk: PrefillChunk) -> Iterator[KeysValues]:
        """Asked for one by one.

        Raises:
            HotsetError: as RemoteArena.read says.
        """
        shape = self._shape
        size = shape.page_elements * shape.record_dtype.itemsize
        for start, end in window_runs(chunk.start, self._window.tokens):
            pages = chunk.arena_pages[start // shape.page_tokens : shape.pages_for(end)].numpy()
            pieces = self._arena.pieces("kv", layer, pages, np.zeros(len(pages), np.int64), size)
            raw = self._arena.read(pieces).view(shape.record_dtype)
            yield self._window.gather(raw, torch.arange(len(pages), dtype=torch.int32), end - start)

    def finish(self) -> None:
        """What was written is staged, and settles with the step."""
