"""The other side of benchmarks/transport.py: a process that answers over one transport until its input ends.

`python -m benchmarks.transport_peer KIND` prints its address in hex. Kinds: tcp, ucx-shm, ucx-tcp, nixl-shm,
nixl-tcp, grpc, and raw-shm, raw-tcp, which are ucxx without anything of ours: a message goes back as it came.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from services.contract.errors import InvalidRequest
from services.contract.transport.counters import TransportCounters
from services.contract.transport.frame import Credentials
from services.contract.transport.nixl_responder import NixlResponder
from services.contract.transport.protocol import Grant, Request
from services.contract.transport.tcp_responder import TcpResponder
from services.contract.transport.ucx_responder import UcxResponder
from services.contract.transport.ucx_worker import UcxOptions, UcxWorker

RECORD_BYTES = 1152
RECORDS = 65_536
MESSAGE_BYTES = 64 * 2**20
ANSWER_BYTES = 4 * 2**20
CREDENTIALS = Credentials(1, 1, bytes(range(16)))
OPTIONS: Mapping[str, UcxOptions] = {
    "shm": UcxOptions(tls="sm,self", lanes="shm"),
    "tcp": UcxOptions(tls="tcp,self", lanes="tcp"),
}
METHOD = "/hotset.benchmark/Gather"
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", 2 * ANSWER_BYTES),
    ("grpc.max_send_message_length", 2 * ANSWER_BYTES),
)
THERE, BACK = 1, 2  # tags of raw messages


class Records:
    """The Service: `i` and indices gather records, `p` and a number is that part of all bytes."""

    def __init__(self) -> None:
        numbers = np.random.default_rng(3).integers(0, 256, RECORDS * RECORD_BYTES, np.uint8)
        self.records = numbers.reshape(RECORDS, RECORD_BYTES)
        self._flat = memoryview(numbers.tobytes())

    def grant(self, session: int) -> Grant | None:
        return Grant(CREDENTIALS.generation, CREDENTIALS.key)

    def answer(self, request: Request, out: memoryview) -> int:
        kind, numbers = bytes(request.body[:4]), np.frombuffer(request.body[4:], "<u4")
        if kind == b"i...":
            length = len(numbers) * RECORD_BYTES
            into = np.frombuffer(out[:length], np.uint8).reshape(-1, RECORD_BYTES)
            np.take(self.records, numbers, 0, out=into, mode="clip")
            return length
        if kind == b"p...":
            start = int(numbers[0]) * ANSWER_BYTES
            out[:ANSWER_BYTES] = self._flat[start : start + ANSWER_BYTES]
            return ANSWER_BYTES
        raise InvalidRequest("neither indices nor a part")


def gather_request(indices: np.ndarray[Any, Any]) -> bytes:
    """For records by index."""
    return b"i..." + indices.astype("<u4").tobytes()


def part_request(number: int) -> bytes:
    """For one part of MESSAGE_BYTES."""
    return b"p..." + np.array([number], "<u4").tobytes()


def _serve_grpc(service: Records) -> tuple[bytes, Callable[[], object]]:
    def gather(body: bytes, context: grpc.ServicerContext) -> bytes:
        room = ANSWER_BYTES if body[:1] == b"p" else (len(body) // 4 - 1) * RECORD_BYTES
        out = bytearray(room)
        return bytes(memoryview(out)[: service.answer(Request(1, memoryview(body)), memoryview(out))])

    server = grpc.server(ThreadPoolExecutor(4), options=GRPC_OPTIONS)
    handler: Any = grpc.unary_unary_rpc_method_handler(gather)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("hotset.benchmark", {"Gather": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return f"127.0.0.1:{port}".encode(), lambda: server.stop(0).wait()


def _echo(kind: str) -> None:
    """Send every message of MESSAGE_BYTES back; the first line of the input is whom to."""
    worker = UcxWorker(OPTIONS[kind])
    print(worker.address.hex(), flush=True)
    endpoint = worker.connect(bytes.fromhex(sys.stdin.readline()))
    buffer = memoryview(bytearray(MESSAGE_BYTES))
    ended = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        ended.set()
        worker.wake()

    threading.Thread(target=await_end, daemon=True).start()

    def finish(request: Any) -> bool:
        """Whether it ended before we were told to."""
        worker.run(lambda: bool(request.completed) or ended.is_set(), float("inf"), spin=False)
        return not ended.is_set()

    while finish(worker.receive(buffer, THERE)) and finish(worker.send(endpoint, buffer, BACK)):
        pass


def main() -> None:
    """Answer until standard input ends."""
    transport, _, lane = sys.argv[1].partition("-")
    if transport == "raw":
        _echo(lane)
        return
    service, counters = Records(), TransportCounters()
    close: Callable[[], object]
    if transport == "grpc":
        address, close = _serve_grpc(service)
    elif transport == "nixl":
        file = os.memfd_create("records")
        os.write(file, service.records.tobytes())
        offered = NixlResponder(OPTIONS[lane], Path(f"/proc/{os.getpid()}/fd/{file}"), counters)
        address, close = offered.address, offered.close
    else:
        responder = (
            TcpResponder(b"127.0.0.1:0", service, counters)
            if transport == "tcp"
            else UcxResponder(OPTIONS[lane], service, counters)
        )
        address, close = responder.address, responder.close
    print(address.hex(), flush=True)
    sys.stdin.read()
    close()


if __name__ == "__main__":
    main()
