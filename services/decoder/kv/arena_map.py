"""The arena as tensors: kvstore's file, mapped into this process, layer by layer.

Knows the contract's layout and nothing of who holds which page. Writing a page that the store did not
give to this engine is a bug that nothing here can catch. For a GPU the tensors are device tensors whose
bytes lie in host memory: kernels read and write them over the bus.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from services.contract.layout import ArenaLayout
from services.decoder.kv.arena_memory import map_arena, register_arena
from services.decoder.kv.shape import KvShape


class ArenaMap:
    """Views of the arena; the mapping lasts as long as this object or any tensor of it does.

    On a GPU only kernels may touch the tensors (`index_select`, `index_copy_`, our own), not the copy engine
    (`copy_`, `clone`, `cpu` of a slice): host_memory.py says why.
    """

    def __init__(
        self,
        path: Path,
        layout: ArenaLayout,
        shape: KvShape,
        device: torch.device,
        *,
        progress: Callable[[int], None] = lambda registered: None,
        called_off: threading.Event | None = None,
    ) -> None:
        """Map the file and make it readable for `device`: at once for a CPU, for a GPU once registered.

        Args:
            path: of the file.
            layout: of its content.
            shape: of records, blocks and pages.
            device: that is to read and write it.
            progress: called with the bytes registered so far, for a GPU.
            called_off: once set, the start is given up after the chunk in progress.

        Raises:
            SetupError: the file cannot be opened, is not as long as the store said, has no room to lie in
                memory, or cannot be registered.
            Unavailable: called off.
        """
        memory = map_arena(path, layout.arena_bytes)
        self.layout = layout
        self._shape = shape
        if device.type == "cuda":
            self._bytes = register_arena(path, memory, device, progress, called_off or threading.Event())
        else:
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def kv_blocks(self, layer: int) -> Tensor:
        """[host pages * groups * blocks a page, block elements] of one layer; the caller may write it."""
        shape = self._shape
        blocks = self.layout.page_count * shape.groups * shape.blocks_per_page
        return self._view("kv", layer, blocks * shape.block_elements, shape.record_dtype).view(
            blocks, shape.block_elements
        )

    def index(self, layer: int) -> Tensor:
        """[host pages, index elements] of one layer that has an index."""
        count = self.layout.page_count * self._shape.index_elements
        return self._view("index", layer, count, self._shape.entry_dtype).view(self.layout.page_count, -1)

    def _view(self, plane: str, layer: int, count: int, dtype: torch.dtype) -> Tensor:
        offset = self.layout.layer_offset(plane, layer)
        length = count * dtype.itemsize
        return self._bytes[offset : offset + length].view(dtype)
