"""The arena's file in this process's memory: mapped, and for a GPU faulted in and registered.

Knows the file and the device; not what lies in it. Only for a GPU are all pages faulted in: registering takes
every one anyway. On a CPU they come as they are first used, so that memory pays for what is used. It is done
here and not by kvstore, because the kernel puts a page near the process that first touches it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from services.contract.byte_size import format_bytes
from services.contract.errors import SetupError
from services.contract.mount import mount_of
from services.decoder.kv.fault_in import fault_in

if TYPE_CHECKING:  # needs the gpu extra
    from services.decoder.kernels.gpu.host_memory import RegisteredMemory

_log = logging.getLogger(__name__)


def map_arena(path: Path, arena_bytes: int) -> mmap.mmap:
    """The file, shared and writable; `arena_bytes` is the length that kvstore told.

    Raises:
        SetupError: it cannot be opened, or has another length.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise SetupError(
            f"cannot map the arena {path}: {error.strerror}; start the engine as kvstore's user "
            f"(this one is {os.geteuid()}; `stat -c %u {path}` says which that is)"
        ) from error
    except OSError as error:
        raise SetupError(
            f"cannot map the arena {path}: {error.strerror}; the engine must run on kvstore's node, "
            "as the same user, with the same tmpfs mounted"
        ) from error
    try:
        length = os.fstat(descriptor).st_size
        if length != arena_bytes:
            raise SetupError(f"the arena {path} is {length} bytes, kvstore said {arena_bytes}")
        return mmap.mmap(descriptor, length)
    finally:
        os.close(descriptor)


def register_arena(
    path: Path,
    memory: mmap.mmap,
    device: torch.device,
    progress: Callable[[int], None],
    called_off: threading.Event,
) -> Tensor:
    """[arena bytes] uint8 of `device`, in the mapping itself, every page in memory and registered.

    Args:
        path: of the file.
        memory: its mapping; lives on until no tensor refers to it.
        device: a GPU.
        progress: called with the bytes registered so far, after each chunk.
        called_off: once set, the start is given up after the chunk in progress.

    Raises:
        SetupError: there is no room for a page, or CUDA refuses.
        Unavailable: called off.
    """
    from services.decoder.kernels.gpu.host_memory import RegisteredMemory  # needs the gpu extra

    check_room(path)
    address, length = torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), len(memory)

    def before(offset: int, size: int) -> None:
        try:
            fault_in(address + offset, size, called_off)
        except OSError as error:
            raise SetupError(no_room(path, error)) from error

    began = time.monotonic()
    progress(0)
    registered = RegisteredMemory(address, length, device, owner=memory, before=before, progress=progress)
    _log.info("arena_registered bytes=%d seconds=%.2f", length, time.monotonic() - began)
    tensor = torch.as_tensor(_DeviceBytes(registered, length), device=device)
    assert tensor.data_ptr() == registered.device_address, "torch has copied the arena to the device"
    return tensor


def check_room(path: Path) -> None:
    """Before anything is faulted in: see that there is room, and say so if pages will not be huge.

    Raises:
        SetupError: the file system has less free than the file still needs.
    """
    mount, found = mount_of(path), path.stat()
    lacking = found.st_size - found.st_blocks * 512
    if lacking > mount.free_bytes:
        raise SetupError(
            f"the arena {path} needs {format_bytes(lacking)} more and its tmpfs has only "
            f"{format_bytes(mount.free_bytes)}; enlarge it: {mount.enlarged(lacking)}"
        )
    if not mount.allows_huge:
        _log.warning(
            "arena_of_small_pages effect=%r mend=%r",
            "4 KiB each: registering takes twice as long, faulting in ten times",
            f"stop kvstore, then: mount -o remount,huge=advise {mount.point}",
        )


def no_room(path: Path, error: OSError) -> str:
    """What to tell a person when a page of the arena could not be brought into memory."""
    if error.errno == errno.EFAULT:  # where a touch would have been a SIGBUS
        mount, found = mount_of(path), path.stat()
        return (
            f"the tmpfs of the arena {path} is full; enlarge it: "
            f"{mount.enlarged(found.st_size - found.st_blocks * 512)}"
        )
    return (
        f"cannot bring the arena {path} into memory: {error.strerror}; "
        "start kvstore with a smaller --arena-bytes, or give this container more memory"
    )


@dataclass(frozen=True, slots=True)
class _DeviceBytes:
    """Registered memory as torch asks for it; torch keeps this object as long as a tensor lies in it."""

    memory: RegisteredMemory
    length: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address = self.memory.device_address
        return {"shape": (self.length,), "typestr": "|u1", "data": (address, False), "version": 3}
