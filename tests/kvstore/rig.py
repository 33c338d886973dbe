"""A store on another host, one here that fetches from it, and a slow cable between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc

from services.kvstore.page_refs import PageRef
from tests.kvstore.etcd import free_ports
from tests.kvstore.pair import UCX, Client, asked, chain
from tests.kvstore.process import KvStore, eventually, listed, token_in
from tests.two_hosts import Host

PAGES = 40  # 7 MB, in two requests; most of a second over the cable
STRUCK_BYTES = 10**6  # have come when something happens in the middle
PULL_SECONDS = 1.5
LONG = 60.0


class Rig:
    """Store `a` there and store `b` here, with a client each; `b` lives as long as this."""

    def __init__(
        self, stack: ExitStack, shm: Path, logs: Path, transport: str, here: Host, there: Host
    ) -> None:
        self.stack, self.shm, self.logs, self.transport = stack, shm, logs, transport
        self.here, self.there = here, there
        self.written: dict[str, list[bytes]] = {}
        self.table: list[str] = []
        self.lives, self.names = 0, 0
        self.kept = 0  # pages that a restarted store there keeps for clients of its earlier life
        self.stopped = 0.0  # when the store there was, monotonic
        self.later = threading.Timer(0.0, lambda: None)  # what is still to happen
        self.taken: list[PageRef] = []  # held here by others
        self.port = 7700 if there.name else free_ports(1)[0]
        self.start_there()
        peer = (f"--peers={self.a.grpc}", f"--pull-seconds={PULL_SECONDS}")
        self.b = self._start(self.here, self.shm / "b", *peer)
        self.at_b = Client(self.b)

    def start_there(self, *, anew: bool = False) -> None:
        """A life of the store there, of the arena that is there or of another."""
        self.lives += anew
        self.a = self._start(self.there, self.shm / f"a{self.lives}")
        self.kept = self.a.stats().sealed_pages
        self.at_a = Client(self.a, token=f"{time.monotonic_ns():032x}")

    def _start(self, host: Host, directory: Path, *more: str) -> KvStore:
        kind, _, lane = self.transport.partition("-")
        flags = [f"--data-transport={kind}", f"--metrics-host={host.address}", *UCX.get(self.transport, ())]
        flags += [f"--ucx-devices={host.device}"] if lane == "tcp" else []
        flags += [f"--data-listen={host.address}:0"] if kind == "tcp" else []
        flags += ["--arena-bytes=16MiB", "--lease-seconds=600"]  # so that no client needs a heartbeat here
        flags += [f"--listen={host.address}:{0 if more else self.port}"]
        wire = token_in(self.logs / "wire") if kind == "nixl" else None
        store = KvStore(directory, *flags, *more, logs=self.logs, before=host.before, wire=wire)
        self.stack.enter_context(store).ready()
        # The channel may share its connection with that of an earlier life, and wait as that one does.
        eventually(lambda: _answers(store), LONG)
        return store

    def name(self) -> str:
        """Of a prefix that was never named before."""
        self.names += 1
        return f"x{self.names}"

    def meet(self) -> None:
        """Have the store here attach anew there, and find something."""
        name = self.name()
        self.seal(name, 1)
        eventually(lambda: self.find(name) == 1, LONG)

    def seal(self, name: str, length: int = PAGES) -> None:
        """Have a prefix there."""
        seed = int.from_bytes(name.encode())  # what has the same hashes has the same bytes
        self.written[name] = self.at_a.sequence_of(chain(name, length), seed)

    def find(self, name: str) -> int:
        """Pages of a prefix that a match finds here, each as it was written."""
        return self.check(name, self.at_b.match(chain(name, len(self.written[name]))))

    def check(self, name: str, pages: Sequence[PageRef]) -> int:
        """Compare the pages found, and let go of them; how many."""
        assert self.at_b.contents(pages) == self.written[name][: len(pages)], "wrong bytes"
        self.at_b.update(releases=pages)
        return len(pages)

    def find_struck(self, name: str, strike: Callable[[], object]) -> int:
        """As `find`; `strike` is called while the bytes are on their way, as far as one sees from outside."""
        before = self._received()
        call = asked(self.at_b, name, len(self.written[name]))
        over_cable = self.transport.endswith("tcp")
        while not call.done() and over_cable and self._received() - before < STRUCK_BYTES:
            time.sleep(0.002)
        if not over_cable:
            time.sleep(0.004)  # memory is too fast to be looked at
        strike()
        return self.check(name, listed(call.result(LONG).pages))

    def settle(self) -> None:
        """Wait until nothing is held at either end; what a lost call had pinned goes with the next attach."""

        def rests() -> bool:
            stats = [store.stats() for store in (self.a, self.b)]
            held = [store.metric("hotset_store_data_held_bytes") for store in (self.a, self.b)]
            pages = [(now.open_pages, now.sealed_pages) for now in stats]
            return not any(held) and pages == [(0, self.kept), (0, 0)]

        for _ in range(10):
            with suppress(AssertionError):
                eventually(rests, LONG / 10)
                return
            self.meet()
        raise AssertionError("something is held for good")

    def _received(self) -> int:
        return int(Path(f"/sys/class/net/{self.here.device}/statistics/rx_bytes").read_text())


def _answers(store: KvStore) -> bool:
    try:
        store.stats()
    except grpc.RpcError:
        return False
    return True
