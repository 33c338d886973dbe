from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.contract.file_lock import FileLock, reap
from tests.contract.lock_holder import end_lock_holder, start_lock_holder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.lock"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start_lock_holder(path)
    yield process
    end_lock_holder(process)


def test_one_holder_at_a_time(path: Path) -> None:
    first, second = FileLock(path), FileLock(path)
    assert first.acquire()
    assert first.acquire()  # idempotent
    assert not second.acquire()
    first.release(remove=False)
    assert second.acquire()
    second.release()
    second.release()
    assert not path.exists()


def test_another_process_holds_it_until_killed(path: Path, holder: subprocess.Popen[str]) -> None:
    assert not FileLock(path).acquire()
    assert not reap(path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert path.exists()
    assert reap(path)
    assert not path.exists()


def test_a_stopped_process_still_holds_it(path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
    assert not reap(path)
    assert path.exists()


def test_a_child_by_exec_does_not_keep_it(path: Path) -> None:
    lock = FileLock(path)
    assert lock.acquire()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        lock.release(remove=False)
        assert FileLock(path).acquire()
    finally:
        child.kill()
        child.communicate()


FORKS_AND_LEAVES = """
import os, pathlib, sys
from services.contract.file_lock import FileLock
lock = FileLock(pathlib.Path(sys.argv[1]))
assert lock.acquire()
if os.fork():
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_a_forked_child_keeps_it_as_it_keeps_the_mapping(path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKS_AND_LEAVES, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "held\n"
    assert parent.wait() == 0
    assert not reap(path)
    parent.communicate()  # ends the child's input, and waits for its output to end
    deadline = time.monotonic() + 5
    while not reap(path):
        assert time.monotonic() < deadline


def test_nothing_to_reap(path: Path) -> None:
    assert reap(path)
    assert not path.exists()


def test_reaping_a_living_holder_does_not_wait(path: Path, holder: subprocess.Popen[str]) -> None:
    start = time.perf_counter()
    for _ in range(100):
        assert not reap(path)
    assert time.perf_counter() - start < 1.0


def test_a_lock_on_a_file_that_was_removed_is_no_lock(path: Path) -> None:
    """The last holder removes the file between our open and our lock: the dead file is worth nothing."""
    lock = FileLock(path)
    assert lock.acquire()
    descriptor = os.open(path, os.O_RDWR)
    lock.release()
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # what a process that opened too early would hold
    newer = FileLock(path)
    assert newer.acquire()
    assert path.exists()
    newer.release()
    os.close(descriptor)


def test_a_reaper_does_not_take_the_lock_from_its_client(path: Path) -> None:
    """A client that locks while the store looks gets its lock all the same, on the file that has the name."""
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            reap(path)
            time.sleep(0.0005)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(300):
            lock = FileLock(path)
            assert lock.acquire()
            assert path.exists()
            assert not reap(path)
            lock.release()
    finally:
        stop.set()
        looker.join()


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FileLock(tmp_path / "none" / "some.lock").acquire()
    assert reap(tmp_path / "none" / "some.lock")
