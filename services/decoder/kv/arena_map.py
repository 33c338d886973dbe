"""The arena as tensors: kvstore's file, mapped into this process, layer by layer.

Knows the contract's layout and nothing of who holds which page. Writing a page that the store did not
give to this engine is a bug that nothing here can catch.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from services.contract.errors import SetupError
from services.contract.layout import ArenaLayout
from services.decoder.kv.shape import KvShape


class ArenaMap:
    """Views of the arena; they are valid for the life of the object, which is that of the engine."""

    def __init__(self, path: Path, layout: ArenaLayout, shape: KvShape) -> None:
        """Map the file.

        Raises:
            SetupError: the file cannot be opened, or is not as long as the store said.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SetupError(
                f"cannot map the arena {path}: {error.strerror}; the engine must run on kvstore's node, "
                "as the same user, with the same tmpfs mounted"
            ) from error
        try:
            length = os.fstat(descriptor).st_size
            if length != layout.arena_bytes:
                raise SetupError(f"the arena {path} is {length} bytes, kvstore said {layout.arena_bytes}")
            memory = mmap.mmap(descriptor, length)
        finally:
            os.close(descriptor)
        self._memory = memory
        self.layout = layout
        self._shape = shape

    def kv_blocks(self, layer: int) -> Tensor:
        """[host pages * groups * blocks a page, block elements] of one layer; the caller may write it."""
        shape = self._shape
        blocks = self.layout.page_count * shape.groups * shape.blocks_per_page
        return self._view("kv", layer, blocks * shape.block_elements).view(blocks, shape.block_elements)

    def bounds(self, layer: int) -> Tensor:
        """[host pages, bounds elements] of one layer."""
        count = self.layout.page_count * self._shape.bounds_elements
        return self._view("index", layer, count).view(self.layout.page_count, -1)

    def _view(self, plane: str, layer: int, count: int) -> Tensor:
        offset = self.layout.layer_offset(plane, layer)
        return torch.frombuffer(self._memory, dtype=self._shape.dtype, count=count, offset=offset)
