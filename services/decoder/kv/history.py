"""What came before a prefill chunk, a window at a time: keys and values in token order.

Knows the record format (docs/records.md) and nothing of where the pages came from. The windows of a history
begin at the same tokens in every mode, so that attention adds up the same parts in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from services.decoder.kernels.step_kernels import StepKernels
from services.decoder.kv.shape import KvShape


class KeysValues(NamedTuple):
    """Both [tokens, kv_heads, head_dim]; of latent records the key is the record, the value a part of it."""

    key: Tensor
    value: Tensor


class Run(NamedTuple):
    """Tokens `start` to `end` - 1 of a row, from one page's edge on."""

    start: int
    end: int


def window_runs(tokens: int, window_tokens: int) -> Iterator[Run]:
    """The first `tokens` tokens of a row in windows; all but the last are full."""
    for start in range(0, tokens, window_tokens):
        yield Run(start, min(start + window_tokens, tokens))


class Window:
    """Room for one layer's records of `tokens` tokens, filled again and again."""

    def __init__(self, kernels: StepKernels, shape: KvShape, tokens: int, device: torch.device) -> None:
        """Allocate. `tokens` is a multiple of the page's."""
        self._kernels = kernels
        self._shape = shape
        self.tokens = tokens
        self.device = device
        self._room = torch.empty(
            tokens * shape.groups * shape.record_elements, dtype=shape.record_dtype, device=device
        )

    def gather(self, source: Tensor, pages: Tensor, tokens: int) -> KeysValues:
        """Fill the window; what it held before is gone once the device's stream gets here.

        Args:
            source: pages of one layer, `page_elements` each, contiguous.
            pages: [ceil(tokens / page_tokens)] int32, in token order.
            tokens: at most the window's.
        """
        shape = self._shape
        room = self._room[: pages.shape[0] * shape.page_elements]
        records = room.view(shape.groups, -1, shape.record_elements)
        self._kernels.gather_pages(shape.as_pages(source), pages, records)
        if shape.latent:
            record = records[0, :tokens].unsqueeze(1)
            return KeysValues(record, record[..., : shape.latent])
        sides = records.view(shape.groups, -1, 2, shape.heads, shape.head_dim)[:, :tokens]
        key, value = (side.transpose(0, 1).flatten(1, 2) for side in (sides[:, :, 0], sides[:, :, 1]))
        return KeysValues(key, value)
