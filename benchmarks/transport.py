"""Bytes between two processes of one machine: packed gathers of 256 records, and 64 MB of pages.

Two processes, each with what it needs of two cores. `copy` gathers in this process and sends nothing: what
cannot be undercut. `raw` is ucxx alone, one message of 64 MB there and back, both ways counted. The others
are hotset's transports, checksums included but over nixl, which has none (and is left out where it is not
installed), and gRPC with the same service behind it. Rounds alternate, so that a busy moment of the machine
meets all; a figure is the median of its rounds.

The last line is `transport_shm_over_copy=value x`: p50 of a gather over UCX's shared memory by the copy's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks import report, transport_nixl
from benchmarks.transport_peer import (
    ANSWER_BYTES,
    BACK,
    CREDENTIALS,
    GRPC_OPTIONS,
    MESSAGE_BYTES,
    METHOD,
    OPTIONS,
    RECORD_BYTES,
    RECORDS,
    THERE,
    Records,
    gather_request,
    part_request,
)
from services.contract.transport.counters import TransportCounters
from services.contract.transport.mapped import MappedRequester
from services.contract.transport.protocol import Requester
from services.contract.transport.tcp_requester import TcpRequester
from services.contract.transport.ucx_requester import UcxRequester
from services.contract.transport.ucx_worker import UcxWorker

CHOSEN = 256
_SECONDS = 60.0
Gather = Callable[[np.ndarray[Any, Any]], None]
Push = Callable[[], None]
TimedGather = Callable[[np.ndarray[Any, Any]], float]
TimedPush = Callable[[], float]


@contextmanager
def peer(kind: str) -> Iterator[tuple[bytes, subprocess.Popen[str]]]:
    """A running peer and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transport_peer", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield bytes.fromhex(process.stdout.readline()), process
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def over(requester: Requester) -> tuple[Gather, Push]:
    """A gather, and all of 64 MB, over one of our transports."""

    def gather(indices: np.ndarray[Any, Any]) -> None:
        room = len(indices) * RECORD_BYTES
        requester.wait(requester.submit(gather_request(indices), room, _SECONDS)).release()

    def push() -> None:
        tickets: deque[Any] = deque()
        for number in range(MESSAGE_BYTES // ANSWER_BYTES):
            if len(tickets) == requester.capabilities.in_flight:
                requester.wait(tickets.popleft()).release()
            tickets.append(requester.submit(part_request(number), ANSWER_BYTES, _SECONDS))
        while tickets:
            requester.wait(tickets.popleft()).release()

    return gather, push


def over_grpc(address: str) -> tuple[Gather, Push]:
    """The same over gRPC, with as many answers under way."""
    channel = grpc.insecure_channel(address, options=GRPC_OPTIONS)
    call: Any = channel.unary_unary(METHOD)  # bytes to bytes

    def gather(indices: np.ndarray[Any, Any]) -> None:
        call(gather_request(indices), timeout=_SECONDS)

    def push() -> None:
        asked: deque[Any] = deque()
        for number in range(MESSAGE_BYTES // ANSWER_BYTES):
            if len(asked) == 4:
                asked.popleft().result()
            asked.append(call.future(part_request(number), timeout=_SECONDS))
        while asked:
            asked.popleft().result()

    return gather, push


def raw(kind: str, address: bytes, process: subprocess.Popen[str]) -> Push:
    """One message of 64 MB there and back, by ucxx alone."""
    worker = UcxWorker(OPTIONS[kind])
    assert process.stdin is not None
    print(worker.address.hex(), file=process.stdin, flush=True)
    endpoint = worker.connect(address)
    there, back = memoryview(bytearray(MESSAGE_BYTES)), memoryview(bytearray(MESSAGE_BYTES))

    def push() -> None:
        received = worker.receive(back, BACK)
        sent = worker.send(endpoint, there, THERE)
        done = worker.run(
            lambda: bool(received.completed and sent.completed), time.monotonic() + _SECONDS, spin=False
        )
        assert done, "the raw echo did not come back"

    return push


def over_nixl(process: subprocess.Popen[str]) -> tuple[TimedGather, TimedPush]:
    """The same in a process of its own, which tells how long each took."""
    return (
        lambda indices: float(transport_nixl.ask(process, json.dumps(indices.tolist()))),
        lambda: float(transport_nixl.ask(process, "push")),
    )


def timed(gather: Gather) -> TimedGather:
    """The same, with how long each takes."""
    return lambda indices: seconds_of(lambda: gather(indices))


def seconds_of(call: Callable[[], None]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    gathers: Mapping[str, TimedGather], pushes: Mapping[str, TimedPush], rounds: int, calls: int
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Seconds of every gather and every push, a list a round."""
    dice = np.random.default_rng(5)
    gathered: dict[str, list[list[float]]] = {name: [] for name in gathers}
    pushed: dict[str, list[float]] = {name: [] for name in pushes}
    for _ in range(rounds):
        for name, gather in gathers.items():
            chosen = dice.integers(0, RECORDS, (calls, CHOSEN))
            for indices in chosen[:20]:
                gather(indices)
            gathered[name].append([gather(indices) for indices in chosen])
        for name, push in pushes.items():
            push()
            pushed[name].append(min(push() for _ in range(3)))
    return gathered, pushed


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300, help="gathers a round")
    arguments = parser.parse_args()
    counters, service = TransportCounters(), Records()
    into = np.empty((CHOSEN, RECORD_BYTES), np.uint8)

    def copy(indices: np.ndarray[Any, Any]) -> None:
        np.take(service.records, indices, 0, out=into, mode="clip")

    gathers: dict[str, TimedGather] = {"copy": timed(copy)}
    pushes: dict[str, TimedPush] = {}
    lanes: dict[str, tuple[str, ...]] = {}
    with ExitStack() as stack:
        for kind in OPTIONS if find_spec("nixl_cu13") else ():
            address, _ = stack.enter_context(peer(f"nixl-{kind}"))
            asker = stack.enter_context(transport_nixl.start(OPTIONS[kind], address))
            assert asker.stdout is not None
            lanes[f"nixl-{kind}"] = tuple(json.loads(asker.stdout.readline()))
            gathers[f"nixl-{kind}"], pushes[f"nixl-{kind}"] = over_nixl(asker)
        address, _ = stack.enter_context(peer("grpc"))
        gather, push = over_grpc(address.decode())
        gathers["grpc"], pushes["grpc"] = timed(gather), partial(seconds_of, push)
        for kind in OPTIONS:
            address, process = stack.enter_context(peer(f"raw-{kind}"))
            pushes[f"raw-{kind}"] = partial(seconds_of, raw(kind, address, process))
        # Last, because who has never asked is let go after ten seconds.
        requesters: dict[str, Requester] = {"mapped": MappedRequester(service, 1, counters)}
        for kind in ("ucx-shm", "ucx-tcp", "tcp"):
            address, _ = stack.enter_context(peer(kind))
            requesters[kind] = (
                TcpRequester(address, CREDENTIALS, counters, _SECONDS)
                if kind == "tcp"
                else UcxRequester(address, CREDENTIALS, counters, _SECONDS, OPTIONS[kind.partition("-")[2]])
            )
        for kind, requester in requesters.items():
            stack.callback(requester.close)
            lanes[kind] = requester.lanes
            gather, push = over(requester)
            gathers[kind], pushes[kind] = timed(gather), partial(seconds_of, push)
        gathered, pushed = measure(gathers, pushes, arguments.rounds, arguments.calls)

    figures: dict[str, str] = {}
    p50 = {name: statistics.median(np.percentile(r, 50) for r in times) for name, times in gathered.items()}
    p99 = {name: statistics.median(np.percentile(r, 99) for r in times) for name, times in gathered.items()}
    moved = {name: MESSAGE_BYTES * (2 if "raw" in name else 1) for name in pushed}
    rate = {name: moved[name] / statistics.median(times) / 1e9 for name, times in pushed.items()}
    for name in gathered:
        figures[f"transport_gather_p50_{name}"] = f"{p50[name] * 1e6:.0f} us"
        figures[f"transport_gather_p99_{name}"] = f"{p99[name] * 1e6:.0f} us"
    for name, value in rate.items():
        figures[f"transport_push_{name}"] = f"{value:.2f} GB/s"
    figures["transport_shm_over_raw"] = f"{rate['ucx-shm'] / rate['raw-shm']:.2f} x"
    figures["transport_tcp_over_raw"] = f"{rate['ucx-tcp'] / rate['raw-tcp']:.2f} x"
    figures["transport_shm_over_grpc"] = f"{rate['ucx-shm'] / rate['grpc']:.2f} x"
    figures["transport_shm_over_copy"] = f"{p50['ucx-shm'] / p50['copy']:.2f} x"
    report.write(
        "transport",
        {
            "records": CHOSEN,
            "record_bytes": RECORD_BYTES,
            "message_bytes": MESSAGE_BYTES,
            "answer_bytes": ANSWER_BYTES,
            "rounds": arguments.rounds,
            "calls": arguments.calls,
            "lanes": {kind: list(names) for kind, names in lanes.items()},
            "figures": figures,
            "rounds_gather_p50_us": {
                name: [round(float(np.percentile(r, 50)) * 1e6, 1) for r in times]
                for name, times in gathered.items()
            },
            "rounds_push_ms": {name: [round(t * 1e3, 2) for t in times] for name, times in pushed.items()},
        },
    )
    for name, text in figures.items():
        print(f"{name}={text}")


if __name__ == "__main__":
    main()
