"""A real kvstore process on free ports, and a real client of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import grpc
from hotset.v1 import kvstore_pb2 as pb
from hotset.v1 import kvstore_pb2_grpc as rpc
from prometheus_client.parser import text_string_to_metric_families

from services.contract.channel import CLIENT_OPTIONS
from services.contract.errors import HotsetError, from_rpc_error
from services.contract.planes import planes_to_wire
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.seals import Seal, Seals
from services.kvstore.wire import refs_from_wire, refs_to_wire
from tests.contract.lock_holder import end_lock_holder, start_lock_holder
from tests.kvstore.world import HEADER
from tests.waiting import Waiting

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 30.0
_READY = re.compile(r"^kvstore ready grpc=(\S+) metrics=(\S+) arena=(\S+)$", re.MULTILINE)


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until `holds()`, and fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


class KvStore:
    """One kvstore process; use as a context manager, which kills what still runs and closes the channel."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        logs: Path,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self._output = logs / f"kvstore-{time.monotonic_ns()}.out"
        self._log = self._output.with_suffix(".err")
        command = [*before, sys.executable, "-m", "services.kvstore", "--arena-dir", str(directory)]
        # Flags given later win, so a test may name its own.
        command += ["--arena-bytes=4MiB", "--listen=127.0.0.1:0", "--metrics-port=0", *flags]
        with self._output.open("w") as output, self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=log, cwd=ROOT, env={**os.environ, **(environment or {})}
            )
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel is not None:
            self._channel.close()
        self.process.kill()
        self.process.wait()
        assert "integrity_violated" not in self.log, self.log

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ready(self) -> Self:
        """Wait for the line that says so, and remember what it says."""
        eventually(lambda: bool(_READY.search(self.output)) or self.process.poll() is not None, START_SECONDS)
        match = _READY.search(self.output)
        assert match is not None, self.log
        self.grpc, self.metrics_address, self.arena = match[1], match[2], Path(match[3])
        self._channel = grpc.insecure_channel(self.grpc, options=CLIENT_OPTIONS)
        self.stub = rpc.KvStoreStub(self._channel)
        self.channel = self._channel
        return self

    def refused(self) -> str:
        """What it says as it gives up starting, with status 2 and no traceback."""
        assert self.process.wait(START_SECONDS) == 2, self.log
        assert self.output == ""
        assert "Traceback" not in self.log
        # gRPC's own library may complain first; ours is the last word.
        return self.log[self.log.index("error: ") :]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def terminate(self) -> float:
        """SIGTERM; the seconds that it waited for anything until it was gone, in order."""
        with Waiting(self.process.pid) as waiting:
            self.process.terminate()
            assert self.process.wait(60) == 0, self.log
        assert "Traceback" not in self.log
        return waiting.seconds

    def stats(self) -> pb.StoreStats:
        return self.stub.Stats(pb.StoreStatsRequest(), timeout=60)

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample of a scrape, read by prometheus-client's own parser."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics().get((name, frozenset(labels.items())), 0.0)


class Answer(NamedTuple):
    """What an update came to."""

    pages: list[PageRef]
    shortfall_pages: int
    free_pages: int
    cached_pages: int


def listed(refs: pb.PageRefs) -> list[PageRef]:
    return list(refs_from_wire(refs))


def seals_to_wire(seals: Seals) -> pb.Seals:
    return pb.Seals(
        pages=refs_to_wire(seals.pages),
        page_hashes=seals.page_hashes,
        parents=refs_to_wire(seals.parents),
        tokens=seals.tokens,
    )


class Client:
    """A client over the wire; a mapped one has a process that holds its lock."""

    def __init__(self, store: KvStore, name: str, token: str, *, mapped: bool) -> None:
        self.store = store
        self.name = name
        self.token = token
        self.kind = pb.CLIENT_KIND_MAPPED if mapped else pb.CLIENT_KIND_REMOTE
        self.lock_path = store.arena.parent / "sessions" / f"{token}.lock"
        self.process: subprocess.Popen[str] | None = start_lock_holder(self.lock_path) if mapped else None
        self.sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            end_lock_holder(self.process)

    def request(self) -> pb.AttachRequest:
        return pb.AttachRequest(
            client_name=self.name,
            kind=self.kind,
            model_fingerprint=HEADER.fingerprint,
            page_tokens=HEADER.page_tokens,
            planes=planes_to_wire(HEADER.planes),
            session_token=self.token,
        )

    def attach(self, held: Sequence[PageRef] = ()) -> pb.AttachReply:
        request = self.request()
        request.held_pages.CopyFrom(refs_to_wire(PageRefs.of(held)))
        self.session = self.store.stub.Attach(request, timeout=60)
        self.sequence = 0
        return self.session

    def update(
        self,
        allocate: int = 0,
        *,
        releases: Sequence[PageRef] = (),
        seals: Sequence[Seal] = (),
    ) -> Answer:
        reply = self.store.stub.Update(
            pb.UpdateRequest(
                session_id=self.session.session_id,
                epoch=self.session.epoch,
                sequence=self.sequence + 1,
                releases=refs_to_wire(PageRefs.of(releases)),
                seals=seals_to_wire(Seals.of(seals)),
                allocate_pages=allocate,
            ),
            timeout=60,
        )
        self.sequence += 1
        return Answer(listed(reply.pages), reply.shortfall_pages, reply.free_pages, reply.cached_pages)

    def match(self, hashes: Sequence[bytes], tokens: bytes = b"") -> list[PageRef]:
        session = self.session
        request = pb.MatchRequest(
            session_id=session.session_id, epoch=session.epoch, page_hashes=hashes, tokens=tokens
        )
        return listed(self.store.stub.Match(request, timeout=60).pages)

    def heartbeat(self) -> pb.HeartbeatReply:
        session = self.session
        return self.store.stub.Heartbeat(
            pb.HeartbeatRequest(session_id=session.session_id, epoch=session.epoch), timeout=60
        )

    def detach(self) -> pb.DetachReply:
        session = self.session
        return self.store.stub.Detach(
            pb.DetachRequest(session_id=session.session_id, epoch=session.epoch), timeout=60
        )


def error_of(call: Callable[[], object]) -> HotsetError:
    """What a call that must fail stands for."""
    try:
        call()
    except grpc.RpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call was served")
