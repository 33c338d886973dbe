"""A process that takes a lock, says so, and holds it until it is killed or its input ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.contract.file_lock import FileLock


def start_lock_holder(path: Path) -> subprocess.Popen[str]:
    """A running holder of the lock at `path`; the caller ends it.

    Raises:
        RuntimeError: it did not get the lock.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.lock_holder", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stdout is not None
    if process.stdout.readline() != "held\n":
        end_lock_holder(process)
        raise RuntimeError(f"no lock on {path}")
    return process


def end_lock_holder(process: subprocess.Popen[str]) -> None:
    """Kill it, whatever state it is in, and wait."""
    process.kill()
    process.communicate()


def main() -> None:
    """Hold the lock on the file that the first argument names."""
    held = FileLock(Path(sys.argv[1])).acquire()
    print("held" if held else "refused", flush=True)  # what the parent waits for
    sys.stdin.read()


if __name__ == "__main__":
    main()
