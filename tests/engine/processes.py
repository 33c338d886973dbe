"""Real kvstores and engines for tests: started, waited for, spoken to, killed and cleared away."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import grpc
from hotset.v1 import engine_pb2 as pb
from hotset.v1 import engine_pb2_grpc as pb_grpc
from hotset.v1 import kvstore_pb2 as store_pb
from hotset.v1 import kvstore_pb2_grpc as store_grpc

from services.contract.channel import CLIENT_OPTIONS
from services.contract.errors import Unavailable
from services.decoder.engine.sequence import TokenIds
from tests.waiting import Waiting

_P = TypeVar("_P", bound="Process")
_T = TypeVar("_T")
_READY = re.compile(r"kvstore ready grpc=(\S+) .*arena=(\S+)")
PATIENCE_SECONDS = 90.0
"""For what takes a few seconds on an idle machine."""

FLAGS: dict[str, object] = {
    "dtype": "float32",
    "budget_tokens": 32,
    "max_step_tokens": 128,
    "max_rows": 4,
    "max_model_len": 1024,
    "threads": 1,
}
"""Of an engine with a tiny model, beside another one."""


def eventually(what: str, true: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.02)


def answered(call: Callable[[], _T], seconds: float = PATIENCE_SECONDS) -> _T:
    """What a store answers: asked again and again, as the loop does it, for nobody tells that it is back."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Unavailable:
            assert time.monotonic() < deadline, f"no answer within {seconds:.0f} s"
        time.sleep(0.05)


class Process:
    """A child in its own process group, with its output kept."""

    def __init__(self, command: Sequence[str], before: Sequence[str] = ()) -> None:
        """`before` is a command that runs the rest of its arguments, such as one that enters a namespace."""
        self.popen = subprocess.Popen(
            [*before, sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={key: value for key, value in os.environ.items() if not key.startswith("HOTSET_")},
        )
        self.output = b""
        self._draining: threading.Thread | None = None

    def read_until(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """The first match of `pattern` in the output."""
        assert self.popen.stdout is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (match := pattern.search(self.text)):
            assert time.monotonic() < deadline, self.text
            if select.select([self.popen.stdout], [], [], 0.1)[0]:
                piece = os.read(self.popen.stdout.fileno(), 65536)
                assert piece, f"it ended: {self.text}"
                self.output += piece
        self.drain()
        return match

    def drain(self) -> None:
        """Keep whatever else it writes, on a thread."""
        assert self.popen.stdout is not None
        pipe = self.popen.stdout

        def read() -> None:
            while piece := os.read(pipe.fileno(), 65536):
                self.output += piece

        self._draining = threading.Thread(target=read, daemon=True)
        self._draining.start()

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", "replace")

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def end(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Send a signal and wait; the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.wait(seconds)

    def end_waits(self, number: int = signal.SIGTERM) -> float:
        """Send a signal, and wait for status 0; the seconds that it waited for anything meanwhile."""
        with Waiting(self.popen.pid) as waiting:
            status = self.end(number, PATIENCE_SECONDS)
        assert status == 0, self.text
        return waiting.seconds

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        status = self.popen.wait(seconds)
        if self._draining is not None:
            self._draining.join(5)
        elif self.popen.stdout is not None:
            self.output += self.popen.stdout.read()
        return status

    def clear_away(self) -> None:
        """Whatever happened, leave no process and no pipe; no check of its books may have failed."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.kill()
        self.wait(30)
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        assert "integrity_violated" not in self.text, self.text


class Keeper:
    """`keep(process)` returns it; at the end all are cleared away, the last one first."""

    def __init__(self) -> None:
        self._kept: list[Process] = []

    def __call__(self, process: _P) -> _P:
        self._kept.append(process)
        return process

    def clear_away(self) -> None:
        with contextlib.ExitStack() as stack:  # all of them, whatever one of them says
            while self._kept:
                stack.callback(self._kept.pop(0).clear_away)


class KvStore(Process):
    """`python -m services.kvstore` on a directory below /dev/shm."""

    def __init__(
        self,
        directory: Path,
        arena_bytes: int,
        *,
        listen: str = "127.0.0.1:0",
        lease: float = 2.0,
        keep: bool = False,
        flags: Sequence[str] = (),
        before: Sequence[str] = (),
    ) -> None:
        self.directory, self.arena_bytes, self.lease = directory, arena_bytes, lease
        super().__init__(
            [
                *("-m", "services.kvstore", "--arena-dir", str(directory), "--listen", listen),
                *("--metrics-port", "0", "--arena-bytes", str(arena_bytes), "--drain-seconds", "0"),
                *("--lease-seconds", str(lease), *(["--keep-arena"] if keep else []), *flags),
            ],
            before,
        )
        ready = self.read_until(_READY)
        self.address, self.arena = ready[1], Path(ready[2])
        self.channel = grpc.insecure_channel(self.address, options=CLIENT_OPTIONS)
        self.stub = store_grpc.KvStoreStub(self.channel)

    def again(self) -> KvStore:
        """The same store started anew, at the same address."""
        self.channel.close()
        return KvStore(self.directory, self.arena_bytes, listen=self.address, lease=self.lease)

    def stats(self) -> store_pb.StoreStats:
        return self.stub.Stats(store_pb.StoreStatsRequest(), timeout=60, wait_for_ready=True)

    def clear_away(self) -> None:
        self.channel.close()
        super().clear_away()


class Engine(Process):
    """`python -m services.decoder.engine`, spoken to over its socket."""

    module = "services.decoder.engine"
    before: Sequence[str] = ()  # as of Process

    def __init__(self, socket: Path, model: Path, kvstore: str, **flags: object) -> None:
        self.socket = socket
        named = {name.replace("_", "-"): value for name, value in flags.items()}
        given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in named.items()]
        super().__init__(
            [
                *("-m", self.module, "--engine-socket", str(socket), "--model", str(model)),
                *("--kvstore", kvstore, *given),
            ],
            self.before,
        )
        self.drain()
        self.channel = grpc.insecure_channel(f"unix:{socket}", options=CLIENT_OPTIONS)
        self.stub = pb_grpc.EngineStub(self.channel)
        self.events: dict[tuple[str, int], list[pb.TokenEvent]] = {}
        self._listening: threading.Thread | None = None
        self._stream: grpc.Call | None = None

    def describe(self) -> pb.EngineDescription | None:
        """What it says of itself; None while nobody listens."""
        with contextlib.suppress(grpc.RpcError):
            return self.stub.Describe(pb.DescribeRequest(), timeout=5)
        return None

    def wait_ready(self) -> pb.EngineDescription:
        """Wait for the state READY, and listen to its events."""

        def ready() -> bool:
            assert self.popen.poll() is None, self.text
            found = self.describe()
            return found is not None and found.state == pb.ENGINE_STATE_READY

        eventually("the engine is ready", ready)
        stream = self.stub.Events(pb.EventsRequest())
        self._stream = stream
        self._listening = threading.Thread(target=self._listen, args=(stream,), daemon=True)
        self._listening.start()
        found = self.describe()
        assert found is not None
        return found

    def _listen(self, stream: Iterator[pb.EventBatch]) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):
            for batch in stream:
                for event in batch.events:
                    self.events.setdefault((event.request_id, event.choice), []).append(event)

    def submit(self, request_id: str, prompt: TokenIds, max_tokens: int, **changes: object) -> None:
        """Greedy, one choice, no end but max_tokens, unless `changes` (fields of SubmitRequest) say so."""
        fields: dict[str, object] = {
            "request_id": request_id,
            "prompt_tokens": prompt,
            "max_tokens": max_tokens,
            "choices": [pb.Choice(index=0, seed=1)],
            "ignore_eos": True,
        }
        self.stub.Submit(pb.SubmitRequest(**fields | changes), timeout=30)  # type: ignore[arg-type]  # fields by name

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        """What has been told so far."""
        return [token.id for event in self.events.get((request_id, choice), []) for token in event.tokens]

    def finished(self, request_id: str, choice: int = 0) -> pb.TokenEvent | None:
        """The last event, once there is an end."""
        events = self.events.get((request_id, choice), [])
        return events[-1] if events and events[-1].finish_reason else None

    def answer(self, request_id: str, choice: int = 0) -> list[int]:
        """Wait for the end of a choice; its tokens."""

        def ended() -> bool:
            assert self.popen.poll() is None, self.text
            return self.finished(request_id, choice) is not None

        eventually(f"{request_id}/{choice} ends", ended)
        return self.tokens(request_id, choice)

    def stats(self) -> pb.EngineStats:
        return self.stub.Stats(pb.EngineStatsRequest(), timeout=60)

    def idle(self) -> bool:
        """Whether everything has come back: rows, slots and pages."""
        now = self.stats()
        assert now.integrity_violations == 0, self.text
        return not (
            now.requests_running
            or now.requests_waiting
            or now.rows_used
            or now.device_pages_used
            or now.hot_slots_used
            or now.host_pages_held
        )

    def clear_away(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        if self._listening is not None:
            self._listening.join(5)
        self.channel.close()
        super().clear_away()
