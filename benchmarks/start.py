"""How long a start takes, from kvstore's process to an engine that serves, with a large arena.

    python -m benchmarks.start [--arena-bytes 48GiB] [--arena-dir DIR]

Real processes: kvstore, then an engine with a small random model, asked over its socket as the front does.
Without `--arena-dir` a tmpfs is mounted for the cases, which takes root. They differ in huge pages or 4 KiB
ones, and in whether the arena's file is new or in memory already. The very first start, with a tiny arena, is
told apart: it also compiles the kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from hotset.v1 import engine_pb2 as pb
from hotset.v1 import engine_pb2_grpc as pb_grpc

from benchmarks import report
from benchmarks.synthetic import synthetic_config, write_checkpoint
from services.contract.byte_size import format_bytes, parse_bytes
from services.contract.channel import CLIENT_OPTIONS

_ENV = {key: value for key, value in os.environ.items() if not key.startswith("HOTSET_")}
_SMALL_BYTES = 256 * 2**20
_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.01
_STAGES = (
    ("importing", "imports_s"),
    ("attaching", "attach_s"),
    ("loading weights", "arena_and_weights_s"),
    ("allocating", "tables_and_graphs_s"),
)
"""How Describe's detail begins -> what the time until it changes is called."""
_LOGGED = ("arena_faulted_in", "arena_registered", "weights_loaded")


@dataclass(frozen=True)
class Case:
    """One start."""

    name: str
    huge: str  # the mount's option
    arena_bytes: int
    keep: bool = False  # leave the file for the next case


class Child:
    """A process with its output kept."""

    def __init__(self, *command: str) -> None:
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_ENV
        )
        self.lines: list[str] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode("utf-8", "replace").rstrip())

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches; the match."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            for line in list(self.lines):
                if found := re.search(pattern, line):
                    return found
            self.check(deadline, pattern)

    def check(self, deadline: float, what: str) -> None:
        """A pause; an error if it ended or the time is up."""
        if self.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no {what}:\n" + "\n".join(self.lines[-30:]))
        time.sleep(_POLL_SECONDS)

    def logged_seconds(self, event: str) -> float | None:
        """What a log line of that event says of its time."""
        for line in self.lines:
            if found := re.search(rf"event={event} .*seconds=([0-9.]+)", line):
                return float(found[1])
        return None

    def end(self) -> float:
        """SIGTERM; the seconds until it was gone."""
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(_PATIENCE_SECONDS)
        self._reading.join(5)
        return time.monotonic() - began


def watch(engine: Child, socket: Path) -> dict[str, float]:
    """Ask the engine how far it is until it serves; seconds in each stage, and the slowest answer."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    seconds = dict.fromkeys((name for _, name in _STAGES), 0.0)
    last, slowest, answered = engine.began, 0.0, None
    name = "to_first_answer_s"
    with grpc.insecure_channel(f"unix:{socket}", options=CLIENT_OPTIONS) as channel:
        stub = pb_grpc.EngineStub(channel)
        while True:
            asked = time.monotonic()
            try:
                told = stub.Describe(pb.DescribeRequest(), timeout=30)
            except grpc.RpcError:
                engine.check(deadline, "answer")
                continue
            now = time.monotonic()
            slowest = max(slowest, now - asked) if answered else 0.0
            answered = now
            seconds[name] = seconds.get(name, 0.0) + now - last
            last = now
            if told.state == pb.ENGINE_STATE_READY:
                return {**seconds, "slowest_answer_ms": slowest * 1e3}
            name = next((stage for text, stage in _STAGES if told.detail.startswith(text)), name)
            engine.check(deadline, "readiness")


def start(case: Case, directory: Path, model: Path, device: str) -> dict[str, Any]:
    """One start and end of both; seconds and bytes."""
    memory = shared_memory_bytes()
    flags = ["--keep-arena"] if case.keep else []
    store = Child(
        *("services.kvstore", "--arena-dir", str(directory / "hotset"), "--listen", "127.0.0.1:0"),
        *("--metrics-port", "0", "--arena-bytes", str(case.arena_bytes), *flags),
    )
    with tempfile.TemporaryDirectory() as sockets:
        socket = Path(sockets) / "e.sock"
        engine = None
        try:
            ready = store.until(r"kvstore ready grpc=(\S+) .* arena=(\S+)")
            store_seconds = time.monotonic() - store.began
            arena = Path(ready[2])
            engine = Child(
                *("services.decoder.engine", "--engine-socket", str(socket), "--model", str(model)),
                *("--kvstore", ready[1], "--device", device, "--max-model-len", "4096", "--max-rows", "8"),
            )
            stages = watch(engine, socket)
            total = time.monotonic() - store.began
            resident = arena.stat().st_blocks * 512
            grown = shared_memory_bytes() - memory
        finally:
            engine_end = engine.end() if engine else 0.0
            store_end = store.end()
    assert engine is not None
    row = {"case": case.name, "arena_bytes": case.arena_bytes, "kvstore_s": store_seconds, **stages}
    row |= {f"{event}_s": engine.logged_seconds(event) for event in _LOGGED}
    row |= {"total_s": total, "engine_end_s": engine_end, "kvstore_end_s": store_end}
    row |= {"arena_resident_bytes": resident, "shared_memory_taken_bytes": grown}
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


def shared_memory_bytes() -> int:
    """Memory that all files on tmpfs mounts of this machine take."""
    found = re.search(r"Shmem:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found[1]) * 1024


@contextlib.contextmanager
def mounted(huge: str, size: int) -> Iterator[Path]:
    """A tmpfs of its own, gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="hotset-start-"))
    options = f"size={size + _SMALL_BYTES},huge={huge},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
        directory.rmdir()


@contextlib.contextmanager
def taken(directory: Path) -> Iterator[Path]:
    """A directory that the caller named; what is made in it goes."""
    try:
        yield directory
    finally:
        shutil.rmtree(directory / "hotset", ignore_errors=True)


def write_model(path: Path, device: str) -> Path:
    """A checkpoint of real shapes and four layers: the start without the reading of many weights."""
    write_checkpoint(synthetic_config("qwen3-0.6b", layers=4), path, path, torch.device(device))
    return path


def main() -> None:
    """Run the cases, print a line each, write results/start.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arena-bytes", type=parse_bytes, default=parse_bytes("48GiB"))
    parser.add_argument("--arena-dir", type=Path, help="on a tmpfs; default: one is mounted for each case")
    parser.add_argument("--device", default="cuda:0")
    wanted = parser.parse_args()
    size = wanted.arena_bytes
    groups: tuple[tuple[Case, ...], ...] = (
        (Case("first start on this machine", "advise", _SMALL_BYTES),),
        (
            Case("huge pages, new file", "advise", size, keep=True),
            Case("huge pages, file in memory", "advise", size),
        ),
        (Case("4 KiB pages, new file", "never", size),),
    )
    if wanted.arena_dir:
        groups = (groups[0], tuple(Case(case.name[12:], "as mounted", size, case.keep) for case in groups[1]))
    rows: list[Mapping[str, Any]] = []
    gpu = report.gpu() if wanted.device != "cpu" else {}
    with tempfile.TemporaryDirectory() as checkpoint:
        model = write_model(Path(checkpoint), wanted.device)
        for cases in groups:
            largest = max(case.arena_bytes for case in cases)
            with (
                taken(wanted.arena_dir) if wanted.arena_dir else mounted(cases[0].huge, largest) as directory
            ):
                for case in cases:
                    row = start(case, directory, model, wanted.device)
                    print(json.dumps(row), flush=True)
                    rows.append(row)
                    path = report.write("start", {**gpu, "rows": rows})
    print(f"results in {path}")
    whole = next(row for row in rows if row["arena_bytes"] == size)
    print(f"start_seconds={whole['total_s']:.2f} s   with {format_bytes(size)} ({whole['case']})")


if __name__ == "__main__":
    main()
