"""The arena as registered host memory: chunks, their edges, failures, and when it is let go."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.contract.errors import SetupError, Unavailable
from services.contract.layout import ArenaLayout
from services.decoder.kernels.gpu.host_memory import RegisteredMemory
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.shape import KvShape

pytestmark = pytest.mark.gpu

MIB = 2**20
DEVICE = torch.device("cuda:0")
SHAPE = KvShape(
    layers=3, kv_heads=4, head_dim=64, groups=4, block_tokens=16, page_tokens=64, dtype=torch.bfloat16
)


def check_context() -> None:
    """The GPU computes, and no earlier error comes up."""
    assert (torch.ones(1000, device=DEVICE) * 3).sum().item() == 3000
    torch.cuda.synchronize()


def shared_memory_bytes() -> int:
    found = re.search(r"Shmem:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Memory:
    """`size` bytes, int64 words that count up."""

    def __init__(self, size: int) -> None:
        self.mapping = mmap.mmap(-1, size)
        self.words = torch.frombuffer(self.mapping, dtype=torch.int64)
        self.words.copy_(torch.arange(size // 8))
        self.address = self.words.data_ptr()

    def on_device(self, registered: RegisteredMemory) -> torch.Tensor:
        class Words:
            __cuda_array_interface__ = {  # noqa: RUF012  # the protocol's name
                "shape": (len(self.words),),
                "typestr": "<i8",
                "data": (registered.device_address, False),
                "version": 3,
            }

        return torch.as_tensor(Words(), device=DEVICE)


def test_kernels_see_no_edge_between_chunks() -> None:
    memory = Memory(9 * MIB)
    told: list[tuple[int, int] | int] = []
    registered = RegisteredMemory(
        memory.address,
        9 * MIB,
        DEVICE,
        before=lambda offset, size: told.append((offset, size)),
        progress=told.append,
        chunk_bytes=4 * MIB,
    )
    assert told == [(0, 4 * MIB), 4 * MIB, (4 * MIB, 4 * MIB), 8 * MIB, (8 * MIB, MIB), 9 * MIB]
    words = memory.on_device(registered)
    edge = 4 * MIB // 8
    around = torch.arange(edge - 1000, edge + 1000, device=DEVICE)
    assert torch.equal(words.index_select(0, around), around)
    words.index_copy_(0, around, -around)
    torch.cuda.synchronize()
    assert torch.equal(memory.words[edge - 1000 : edge + 1000], -around.cpu())
    assert memory.words[edge - 1001] == edge - 1001
    with pytest.raises(RuntimeError, match="invalid argument"):
        words[edge - 1000 : edge + 1000].clone()  # the copy engine does; whoever changes that may say so
    check_context()
    registered.close()
    registered.close()
    check_context()


def test_a_failure_leaves_nothing_registered_and_the_context_in_order() -> None:
    memory = Memory(8 * MIB)
    done: list[int] = []
    protect(memory.address + 4 * MIB, 4 * MIB, 0)  # nobody may pin the second chunk
    with pytest.raises(SetupError, match=r"at byte 4,194,304 of 8,388,608 \(CUDA driver: CUDA_ERROR"):
        RegisteredMemory(memory.address, 8 * MIB, DEVICE, chunk_bytes=4 * MIB, progress=done.append)
    assert done == [4 * MIB]
    check_context()
    protect(memory.address + 4 * MIB, 4 * MIB, mmap.PROT_READ | mmap.PROT_WRITE)
    registered = RegisteredMemory(memory.address, 8 * MIB, DEVICE)  # or it would say: registered already
    with pytest.raises(SetupError, match="ALREADY_REGISTERED"):
        RegisteredMemory(memory.address, 8 * MIB, DEVICE)
    check_context()
    words = memory.on_device(registered)
    assert words.sum().item() == memory.words.sum().item()
    registered.close()


def protect(address: int, size: int, protection: int) -> None:
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection) == 0


@pytest.fixture
def arena() -> Iterator[tuple[Path, ArenaLayout]]:
    """A new file of 96 MiB on a tmpfs, sparse as kvstore makes it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "arena.bin"
        with path.open("wb") as file:
            file.truncate(96 * MIB)
        yield path, ArenaLayout.fit(96 * MIB, SHAPE.page_tokens, SHAPE.planes(with_index=True))


def test_one_arena_all_of_it_in_memory(arena: tuple[Path, ArenaLayout]) -> None:
    path, layout = arena
    check_context()  # CUDA's own shared memory comes first
    before = shared_memory_bytes()
    progress: list[int] = []
    mapped = ArenaMap(path, layout, SHAPE, DEVICE, progress=progress.append)
    assert path.stat().st_blocks * 512 == 96 * MIB
    assert 95 * MIB < shared_memory_bytes() - before < 1.5 * 96 * MIB, "more than one arena"
    assert progress == [0, 96 * MIB]
    blocks = mapped.kv_blocks(2)
    assert blocks.device == DEVICE
    blocks.index_fill_(0, torch.tensor([5], device=DEVICE), 1.5)
    torch.cuda.synchronize()
    with path.open("rb") as file:
        file.seek(layout.layer_offset("kv", 2) + 5 * SHAPE.block_bytes)
        there = torch.frombuffer(bytearray(file.read(SHAPE.block_bytes)), dtype=torch.bfloat16)
    assert bool((there == 1.5).all())


def test_it_is_let_go_with_its_last_tensor(arena: tuple[Path, ArenaLayout]) -> None:
    """So that the next one can lie at the same address."""
    path, layout = arena
    for _ in range(8):
        mapped = ArenaMap(path, layout, SHAPE, DEVICE)
        blocks = mapped.kv_blocks(0)
        del mapped
        gc.collect()
        assert blocks.index_select(0, torch.zeros(1, dtype=torch.int64, device=DEVICE)).sum().item() == 0
        assert str(path) in Path("/proc/self/maps").read_text()
        del blocks
        gc.collect()
        assert str(path) not in Path("/proc/self/maps").read_text()
    check_context()


def test_called_off_between_chunks(arena: tuple[Path, ArenaLayout]) -> None:
    path, layout = arena
    called_off = threading.Event()
    with pytest.raises(Unavailable, match="called off"):
        ArenaMap(path, layout, SHAPE, DEVICE, progress=lambda done: called_off.set(), called_off=called_off)
    gc.collect()
    check_context()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_python_goes_on_while_a_chunk_is_registered() -> None:
    size = 2 * 2**30
    memory = mmap.mmap(-1, size)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    longest, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal longest
        last = time.monotonic()
        while not ended.wait(0.001):
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    check_context()
    watching = threading.Thread(target=watch)
    watching.start()
    began = time.monotonic()
    registered = RegisteredMemory(address, size, DEVICE, owner=memory)  # the driver faults it in
    took = time.monotonic() - began
    ended.set()
    watching.join()
    registered.close()
    assert longest < took / 3
