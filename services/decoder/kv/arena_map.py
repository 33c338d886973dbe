"""The arena as tensors: kvstore's file, mapped into this process, layer by layer.

Knows the contract's layout and nothing of who holds which page. Writing a page that the store did not
give to this engine is a bug that nothing here can catch. For a GPU the mapping is registered with CUDA, and
the tensors are device tensors whose bytes lie in host memory: kernels read and write them over the bus.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.contract.errors import SetupError
from services.contract.layout import ArenaLayout
from services.decoder.kv.shape import KvShape


class ArenaMap:
    """Views of the arena; they are valid for the life of the object, which is that of the engine."""

    def __init__(self, path: Path, layout: ArenaLayout, shape: KvShape, device: torch.device) -> None:
        """Map the file and make it readable for `device`.

        Raises:
            SetupError: the file cannot be opened, is not as long as the store said, or cannot be registered.
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
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.layout = layout
        self._shape = shape
        if device.type == "cuda":
            from services.decoder.kernels.gpu.host_memory import RegisteredMemory  # needs the gpu extra

            self._registered = RegisteredMemory(self._bytes.data_ptr(), length)
            self._bytes = torch.as_tensor(
                _DeviceBytes(self._registered.device_address, length), device=device
            )

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
        length = count * self._shape.dtype.itemsize
        return self._bytes[offset : offset + length].view(self._shape.dtype)


@dataclass(frozen=True, slots=True)
class _DeviceBytes:
    """Host memory at the address that the device knows it by."""

    address: int
    length: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.length,), "typestr": "|u1", "data": (self.address, False), "version": 3}
