"""Who asks over nixl in benchmarks/transport.py: a process of its own, as that one has loaded ucxx's UCX.

`python -m benchmarks.transport_nixl TLS LANES ADDRESS` reads requests as lines, indices as JSON or `push`; it
answers each with the seconds that it took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.transport_peer import (
    ANSWER_BYTES,
    MESSAGE_BYTES,
    RECORD_BYTES,
    gather_request,
    part_request,
)
from services.contract.transport.counters import TransportCounters
from services.contract.transport.nixl_memory import NixlMemory, Spans
from services.contract.transport.nixl_requester import NixlRequester
from services.contract.transport.ucx_worker import UcxOptions

_SECONDS = 60.0


class FarRecords:
    """The Reader that does what transport_peer's Records answer."""

    def __init__(self, far: NixlMemory) -> None:
        self._far = far

    def answer(self, body: memoryview, out: memoryview, deadline: float) -> int:
        """Read records, or a part of all bytes."""
        numbers = np.frombuffer(body[4:], "<u4").astype(np.int64)
        size = RECORD_BYTES if bytes(body[:1]) == b"i" else ANSWER_BYTES
        length = size * len(numbers)
        self._far.read(Spans(numbers * size, np.full(len(numbers), size)), out[:length], deadline)
        return length


def start(options: UcxOptions, address: bytes) -> subprocess.Popen[str]:
    """The process; its first line is the lanes it may use, as JSON."""
    command = [sys.executable, "-m", "benchmarks.transport_nixl", options.tls, options.lanes, address.hex()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str], what: str) -> Any:
    """One line to it, and what it says."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(what, file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def main() -> None:
    """Do what standard input says, until it ends."""
    tls, lanes, address = sys.argv[1:]
    memory = NixlMemory(bytes.fromhex(address), UcxOptions(tls=tls, lanes=lanes))
    requester = NixlRequester(memory, FarRecords(memory), TransportCounters())

    def push() -> None:
        for number in range(MESSAGE_BYTES // ANSWER_BYTES):
            requester.wait(requester.submit(part_request(number), ANSWER_BYTES, _SECONDS)).release()

    def gather(indices: list[int]) -> Callable[[], None]:
        request, room = gather_request(np.array(indices)), len(indices) * RECORD_BYTES
        return lambda: requester.wait(requester.submit(request, room, _SECONDS)).release()

    print(json.dumps(requester.lanes), flush=True)
    for line in sys.stdin:
        call = push if line.strip() == "push" else gather(json.loads(line))
        begin = time.perf_counter()
        call()
        print(json.dumps(time.perf_counter() - begin), flush=True)
    requester.close()


if __name__ == "__main__":
    main()
