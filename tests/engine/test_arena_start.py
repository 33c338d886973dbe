"""The arena's way into memory: faulting in, what is told when it fails, and starts that are slow at it."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hotset.v1 import engine_pb2 as pb

from services.contract.errors import SetupError, Unavailable
from services.contract.mount import mount_of
from services.decoder.front.engine_process import TERM_SECONDS
from services.decoder.kernels.gpu.host_memory import refusal
from services.decoder.kv import fault_in as faulting
from services.decoder.kv.arena_memory import check_room, map_arena, no_room
from services.decoder.kv.fault_in import fault_in, fault_in_file
from tests.decoder import checkpoints
from tests.engine.processes import Engine, Keeper, KvStore, eventually

MIB = 2**20
GIB = 2**30
HUGE = 2 * MIB


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def resident(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB whose pages may be huge."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,huge=advise", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("this user may not mount")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.parametrize("kernel", ["this one", "before 5.14"])
@pytest.mark.parametrize("size", [4096, 3 * MIB + 4096, 300 * MIB])
def test_every_page_comes_into_memory_and_keeps_its_bytes(
    shm: Path, size: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel != "this one":
        monkeypatch.setattr(faulting, "_MADV_POPULATE_WRITE", 9999)  # which the kernel does not know either
    path = sparse(shm / "arena", size)
    with path.open("r+b") as file:
        file.write(b"header")
        file.seek(size - 4)
        file.write(b"tail")
    assert size <= 8192 or resident(path) < size
    fault_in_file(path, threading.Event())
    assert resident(path) == size
    with path.open("rb") as file:
        assert file.read(6) == b"header"
        file.seek(-4, os.SEEK_END)
        assert file.read() == b"tail"


def test_the_second_time_finds_everything_there(shm: Path) -> None:
    """Zeroing takes long: pages stay when the mapping that brought them goes, and none is made anew."""
    path = sparse(shm / "arena", 32 * MIB)
    brought = []
    for _ in range(2):
        before = resident(path)
        fault_in_file(path, threading.Event())
        brought.append(resident(path) - before)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
            assert not pages.any() if len(brought) == 1 else (pages == 7).all()
            pages[:] = 7
            del pages
    assert brought == [32 * MIB, 0]


def test_pages_are_huge_where_the_mount_allows_it(mounted: Path) -> None:
    size = 5 * HUGE + 4096
    memory = map_arena(sparse(mounted / "arena", size), size)
    view = ctypes.c_char.from_buffer(memory)
    fault_in(ctypes.addressof(view), size, threading.Event())
    smaps = Path("/proc/self/smaps").read_text()
    of_arena = smaps[smaps.index(str(mounted / "arena")) :]
    found = re.search(r"ShmemPmdMapped:\s+(\d+) kB", of_arena)
    assert found is not None
    assert int(found[1]) * 1024 == 5 * HUGE
    del view
    memory.close()


def test_other_threads_run_meanwhile(shm: Path) -> None:
    path = sparse(shm / "arena", 768 * MIB)
    turns = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal turns
        while not ended.wait(0.001):
            turns += 1

    counting = threading.Thread(target=count)
    counting.start()
    began = time.monotonic()
    fault_in_file(path, threading.Event())
    took = time.monotonic() - began
    ended.set()
    counting.join()
    assert turns > took / 0.006, "a turn takes little more than 0.001 s"


def test_called_off(shm: Path) -> None:
    path = sparse(shm / "arena", 64 * MIB)
    called_off = threading.Event()
    called_off.set()
    with pytest.raises(Unavailable, match="called off"):
        fault_in_file(path, called_off)
    assert resident(path) == 0


def test_a_tmpfs_that_is_full(mounted: Path) -> None:
    """Known before a page is touched, and when somebody else takes the room meanwhile."""
    path = sparse(mounted / "arena", 24 * MIB)
    mend = f"mount -o remount,size=24m {mounted}"
    with pytest.raises(SetupError, match="needs 24 MiB more and its tmpfs has only 16 MiB") as told:
        check_room(path)
    assert str(told.value).endswith(mend)
    with pytest.raises(OSError, match="Bad address") as failed:
        fault_in_file(path, threading.Event())
    assert failed.value.errno == errno.EFAULT
    assert no_room(path, failed.value).endswith(f"is full; enlarge it: {mend}")
    subprocess.run(mend.split(), check=True)
    check_room(path)
    fault_in_file(path, threading.Event())
    assert resident(path) == 24 * MIB


def test_memory_that_is_short(shm: Path) -> None:
    told = no_room(sparse(shm / "arena", MIB), OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert "Cannot allocate memory; start kvstore with a smaller --arena-bytes" in told


def test_small_pages_are_worth_a_warning(shm: Path, mounted: Path, caplog: pytest.LogCaptureFixture) -> None:
    if mount_of(shm).allows_huge:
        pytest.skip("the tmpfs of this machine allows huge pages")
    with caplog.at_level(logging.WARNING):
        check_room(sparse(mounted / "arena", MIB))
        assert caplog.messages == []
        check_room(sparse(shm / "arena", MIB))
    assert f"mount -o remount,huge=advise {mount_of(shm).point}" in caplog.text


def test_an_arena_that_cannot_be_mapped(shm: Path) -> None:
    path = sparse(shm / "arena", MIB)
    with pytest.raises(SetupError, match="No such file or directory; the engine must run on kvstore's node"):
        map_arena(shm / "nothing", MIB)
    with pytest.raises(SetupError, match="is 1048576 bytes, kvstore said 4096"):
        map_arena(path, 4096)
    path.chmod(0o400)
    if os.geteuid() == 0:
        assert len(map_arena(path, MIB)) == MIB  # root may everything
    else:
        with pytest.raises(SetupError, match="Permission denied; start the engine as kvstore's user"):
            map_arena(path, MIB)


def test_a_refusal_by_the_driver_tells_where_and_what_mends_it() -> None:
    told = refusal("CUDA_ERROR_OUT_OF_MEMORY", 8 * GIB, 48 * GIB, 8 * MIB)
    assert "at byte 8,589,934,592 of 51,539,607,552 (CUDA_ERROR_OUT_OF_MEMORY)" in told
    assert "limit on locked memory is 8 MiB; raise it: ulimit -l unlimited" in told
    assert "ulimits: {memlock: -1}" in told
    assert "LimitMEMLOCK=infinity" in told
    for enough in (resource.RLIM_INFINITY, 48 * GIB):
        other = refusal("CUDA_ERROR_OUT_OF_MEMORY", 0, 48 * GIB, enough)
        assert "ulimit" not in other
        assert "dmesg" in other


class SlowEngine(Engine):
    module = "tests.engine.slow_start"


@pytest.fixture
def store(shm: Path, keep: Keeper) -> KvStore:
    return keep(KvStore(shm / "arena", 8 * MIB))


@pytest.fixture
def slow(
    shm: Path, keep: Keeper, store: KvStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> SlowEngine:
    model = checkpoints.save(tmp_path / "tiny", "llama", head_dim=16, max_position_embeddings=4096)
    monkeypatch.setenv("SLOW_START", fault)
    flags = {"dtype": "float32", "budget_tokens": 32, "max_step_tokens": 64, "max_rows": 4, "threads": 1}
    return keep(SlowEngine(shm / "e.sock", model, store.address, **flags))


def told(engine: Engine) -> pb.EngineDescription:
    return engine.describe() or pb.EngineDescription()


@pytest.mark.parametrize("fault", ["arena", "chunk"])
def test_health_answers_and_weights_load_meanwhile_and_sigterm_ends_it(
    slow: SlowEngine, store: KvStore, fault: str
) -> None:
    eventually("weights are loaded beside it", lambda: "event=weights_loaded" in slow.text)
    first = told(slow)
    assert first.state == pb.ENGINE_STATE_STARTING
    assert first.arena_bytes == 8 * MIB
    assert first.detail.startswith("loading weights")
    assert "of the arena's 8 MiB" in first.detail
    if fault == "arena":
        eventually(
            "it advances", lambda: told(slow).arena_registered_bytes > first.arena_registered_bytes, 10
        )
    assert slow.end_waits() < TERM_SECONDS, "the front kills it then"
    assert "Traceback" not in slow.text
    eventually("no session is left", lambda: store.stats().sessions == 0)


@pytest.mark.parametrize("fault", ["weights"])
def test_a_failed_registration_does_not_wait_for_the_weights(slow: SlowEngine, fault: str) -> None:
    assert slow.wait(30) == 2
    assert "error: cannot pin the arena, says the test" in slow.text
    assert "Traceback" not in slow.text


def test_a_broken_checkpoint_does_not_wait_for_the_arena(
    shm: Path, keep: Keeper, store: KvStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoints.save(tmp_path / "tiny", "llama", head_dim=16, max_position_embeddings=4096)
    (model / "model.safetensors").write_bytes(b"nothing of the kind")
    monkeypatch.setenv("SLOW_START", "chunk")
    engine = keep(SlowEngine(shm / "e.sock", model, store.address, threads=1))
    assert engine.wait(30) == 2
    assert "error: " in engine.text
