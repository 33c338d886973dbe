"""Host memory that kernels may read and write: an address range, registered with CUDA.

Knows addresses, not what lies there.

The range is registered chunk by chunk. Kernels see no edges between chunks. The copy engine does: one copy
(`Tensor.copy_`, `clone`, `cpu` of a contiguous slice) that reaches over an edge fails with "invalid argument"
(seen with driver 580.159), so whoever reads or writes registered memory does it by kernels, or cuts copies at
the edges.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable

import torch
from cuda.bindings import driver

from services.contract.byte_size import format_bytes
from services.contract.errors import SetupError
from services.decoder.kernels.gpu.kernel import check

CHUNK_BYTES = 8 * 2**30
"""Nothing can interrupt the driver while it pins a chunk: 0.2 s of huge pages, 0.4 s of 4 KiB pages (on an
H200 machine, November 2026). 64 GiB at once are no faster, and more than 512 GiB at once fail."""


class RegisteredMemory:
    """Registered on construction, and until `close` or until nothing refers to this object any more.

    At the end of the process the kernel's own clearing up unregisters, which takes as long: 1 s for 48 GiB.
    """

    def __init__(
        self,
        address: int,
        length: int,
        device: torch.device | None = None,
        *,
        owner: object = None,
        before: Callable[[int, int], None] = lambda offset, size: None,
        progress: Callable[[int], None] = lambda done: None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Register `length` bytes at `address`, both multiples of the page size.

        Args:
            address: of the mapping in this process.
            length: bytes.
            device: whose context registers; default: torch's current one. Every device may use the memory.
            owner: kept alive for as long as the memory is registered: the mapping, so that nothing else can
                come to lie at its address meanwhile.
            before: called with a chunk's offset and bytes before it is registered; may raise to stop.
            progress: called with the bytes registered so far; may raise to stop.
            chunk_bytes: registered at once, a multiple of the page size.

        Raises:
            SetupError: the driver refused; the message says where, and what mends it. As whenever this fails,
                nothing stays registered and the context goes on working.
        """
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes torch's context, if there is none, and this thread's current one
            context = check(driver.cuCtxGetCurrent())
            chunks: list[int] = []
            self.close = weakref.finalize(self, _unregister, context, chunks, owner)
            self.close.atexit = False
            try:
                _register(address, length, chunk_bytes, chunks, before, progress)
                self.device_address = _device_address(address, length, chunk_bytes)
            except BaseException:
                self.close()
                raise


def copy_async(target: int, source: int, size: int, stream: int) -> None:
    """Have a copy engine move bytes, in the order of a stream; neither side may reach over an edge.

    Args:
        target: as the device addresses it.
        source: likewise.
        size: bytes.
        stream: the handle.
    """
    check(driver.cuMemcpyAsync(target, source, size, stream))


def _register(
    address: int,
    length: int,
    chunk_bytes: int,
    chunks: list[int],
    before: Callable[[int, int], None],
    progress: Callable[[int], None],
) -> None:
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    for offset in range(0, length, chunk_bytes):
        size = min(chunk_bytes, length - offset)
        before(offset, size)
        try:
            check(driver.cuMemHostRegister(address + offset, size, flags))
        except RuntimeError as error:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            raise SetupError(refusal(str(error), offset, length, limit)) from error
        chunks.append(address + offset)
        progress(offset + size)


def refusal(reason: str, offset: int, length: int, memlock: int) -> str:
    """What to tell a person when the driver did not pin the chunk at `offset`.

    Args:
        reason: the driver's.
        offset: bytes registered before.
        length: bytes wanted in all.
        memlock: this process's limit on locked memory, bytes; RLIM_INFINITY = none.
    """
    what = f"cannot pin the arena for the GPU at byte {offset:,} of {length:,} ({reason})"
    if memlock != resource.RLIM_INFINITY and memlock < length:
        return (
            f"{what}: the limit on locked memory is {format_bytes(memlock)}; raise it: ulimit -l unlimited "
            "(in compose: ulimits: {memlock: -1}; in a systemd unit: LimitMEMLOCK=infinity)"
        )
    return (
        f"{what}: no limit of this process is in the way; `dmesg | grep -i nvrm` may say what is. "
        "Start kvstore with a smaller --arena-bytes if memory is short"
    )


def _device_address(address: int, length: int, chunk_bytes: int) -> int:
    """The device's name for `address`, if it goes on without a gap over all chunks."""
    first = int(check(driver.cuMemHostGetDevicePointer(address, 0)))
    for offset in range(0, length, chunk_bytes):
        if int(check(driver.cuMemHostGetDevicePointer(address + offset, 0))) != first + offset:
            raise SetupError(
                "this GPU gives registered memory addresses of its own, which no kernel here can follow; "
                "it needs a system with unified addressing (any 64-bit Linux with a current driver)"
            )
    return first


def _unregister(context: driver.CUcontext, chunks: list[int], owner: object) -> None:
    """Once the GPU has done what uses the memory; from any thread. `owner` has been kept until now."""
    if not chunks:
        return
    check(driver.cuCtxPushCurrent(context))
    try:
        check(driver.cuCtxSynchronize())
        while chunks:
            check(driver.cuMemHostUnregister(chunks.pop()))
    finally:
        check(driver.cuCtxPopCurrent())
