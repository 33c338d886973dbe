"""Host memory that kernels may read and write: an address range, registered with CUDA.

Knows addresses, not what lies there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from cuda.bindings import driver

from services.contract.byte_size import format_bytes
from services.contract.errors import SetupError
from services.decoder.kernels.gpu.kernel import check

CHUNK_BYTES = 64 * 2**30
"""One registration of more than 512 GiB fails in the driver; 64 GiB also gives progress to report."""


class RegisteredMemory:
    """Registered on construction, chunk by chunk; `close` before the memory is unmapped."""

    def __init__(
        self, address: int, length: int, progress: Callable[[int], None] = lambda done: None
    ) -> None:
        """Register `length` bytes at `address`, both multiples of the page size.

        Args:
            address: of the mapping in this process.
            length: bytes.
            progress: called with the bytes registered so far.

        Raises:
            SetupError: the driver refused; the message says where, and what mends it.
        """
        torch.cuda.synchronize()  # the driver's calls need torch's context, which this makes if there is none
        self._chunks: list[int] = []
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        for offset in range(0, length, CHUNK_BYTES):
            size = min(CHUNK_BYTES, length - offset)
            try:
                check(driver.cuMemHostRegister(address + offset, size, flags))
            except RuntimeError as error:
                self.close()
                raise SetupError(
                    f"cannot register the arena with CUDA at byte {offset:,} of {format_bytes(length)}: "
                    f"{error}; raise the memlock limit (ulimit -l unlimited, or memlock: -1 in compose)"
                ) from error
            self._chunks.append(address + offset)
            progress(offset + size)
        self.device_address = int(check(driver.cuMemHostGetDevicePointer(address, 0)))

    def close(self) -> None:
        """Unregister; idempotent."""
        while self._chunks:
            check(driver.cuMemHostUnregister(self._chunks.pop()))
