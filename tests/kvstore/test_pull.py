"""A prefix sealed in one store is found in another: pulled over any transport, whole or not at all."""

from __future__ import annotations

import mmap
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hotset.v1 import kvstore_pb2 as pb

from services.contract.errors import StateConflict
from services.contract.file_header import FileHeader
from services.contract.layout import ArenaLayout
from services.contract.planes import Plane, PlaneLayer, planes_to_wire
from services.contract.transport.counters import TransportCounters
from services.contract.transport.frame import Credentials
from services.contract.transport.mapped import MappedRequester
from services.contract.transport.protocol import Requester, Ticket
from services.kvstore.mapped_source import MappedSource
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_fetch import Face, PageFetcher
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.page_request import write_request
from tests.contract.transport.peer import connect
from tests.kvstore import process
from tests.kvstore.process import KvStore, eventually

TRANSPORTS = ("mapped", "tcp", "ucx-shm", "ucx-tcp")
UCX = {
    "ucx-shm": ("--ucx-tls=sm,self", "--ucx-lanes=shm"),
    "ucx-tcp": ("--ucx-tls=tcp,self", "--ucx-lanes=tcp"),
}
LANES = {"tcp": ("tcp/127",), "ucx-shm": ("sysv/", "posix/"), "ucx-tcp": ("tcp/lo",)}
PAGES = 12
# Two planes, layers that differ, one that keeps nothing; 6 MiB hold 23 pages.
HEADER = FileHeader(
    64,
    bytes(32),
    (
        Plane("kv", (PlaneLayer(2, 4, 12288), PlaneLayer(1, 3, 4112), PlaneLayer(2, 4, 8192))),
        Plane("index", (PlaneLayer(2, 4, 48), PlaneLayer(0, 0, 0), PlaneLayer(1, 1, 16))),
    ),
)


def flags(transport: str) -> list[str]:
    return [f"--data-transport={transport.split('-')[0]}", *UCX.get(transport, ())]


class Client(process.Client):
    """A remote client with pages of two planes, and a look at the arena to fill and compare them."""

    def __init__(self, store: KvStore, name: str = "engine-0", token: str = "0" * 31 + "1") -> None:
        super().__init__(store, name, token, mapped=False)
        self.attach()
        with store.arena.open("r+b") as file:
            buffer = memoryview(mmap.mmap(file.fileno(), 0))
        self.layout = ArenaLayout.fit(len(buffer), HEADER.page_tokens, HEADER.planes)
        self.bytes = PageBytes(buffer, self.layout)

    def request(self) -> pb.AttachRequest:
        request = super().request()
        del request.planes[:]
        request.planes.extend(planes_to_wire(HEADER.planes))
        return request

    def sequence_of(self, hashes: Sequence[bytes], seed: int) -> list[bytes]:
        """Pages with bytes at random, sealed under `hashes` and let go of; their bytes."""
        pages = list(self.update(len(hashes)).pages)
        contents = [
            random.Random(f"{seed} {at}").randbytes(self.layout.page_bytes) for at in range(len(pages))
        ]
        for page, content in zip(pages, contents, strict=True):
            self.bytes.unpack(np.array([page.page]), memoryview(content))
        seals = [
            pb.Seal(page=page, page_hash=page_hash, parent=pages[at - 1] if at else None)
            for at, (page, page_hash) in enumerate(zip(pages, hashes, strict=True))
        ]
        self.update(seals=seals)
        self.update(releases=pages)
        return contents

    def match(self, hashes: Sequence[bytes]) -> list[pb.PageRef]:
        session = self.session
        request = pb.MatchRequest(session_id=session.session_id, epoch=session.epoch, page_hashes=hashes)
        return list(self.store.stub.Match(request, timeout=10).pages)

    def contents(self, pages: Sequence[pb.PageRef]) -> list[bytes]:
        found = []
        for page in pages:
            out = bytearray(self.layout.page_bytes)
            self.bytes.pack(np.array([page.page]), memoryview(out))
            found.append(bytes(out))
        return found


def chain(name: str, length: int = PAGES) -> list[bytes]:
    return [f"{name}-{at}".encode().ljust(16, b".") for at in range(length)]


class Pair:
    """Store `b` fetches from store `a`."""

    def __init__(self, stack: ExitStack, shm: Path, logs: Path, transport: str, *more: str) -> None:
        self.stack, self.shm, self.logs, self.transport, self.more = stack, shm, logs, transport, more
        self.a = self.start("a")
        self.b = self.start("b", f"--peers={self.a.grpc}", *more)
        self.at_a, self.at_b = Client(self.a), Client(self.b)

    def start(self, name: str, *more: str) -> KvStore:
        store = KvStore(self.shm / name, "--arena-bytes=6MiB", *flags(self.transport), *more, logs=self.logs)
        return self.stack.enter_context(store).ready()

    def rests(self) -> bool:
        """Nothing is held at either end but by the clients."""
        stats = [store.stats() for store in (self.a, self.b)]
        return all(now.open_pages == now.sealed_pages == 0 for now in stats)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_a_prefix_is_pulled_byte_for_byte(
    stack: ExitStack, shm: Path, tmp_path: Path, transport: str
) -> None:
    pair = Pair(stack, shm, tmp_path, transport)
    written = pair.at_a.sequence_of(chain("x"), 1)
    found = pair.at_b.match([*chain("x"), *chain("more", 3)])
    assert len(found) == PAGES
    assert pair.at_b.contents(found) == written
    pair.at_b.update(releases=found)
    again = pair.at_b.match(chain("x"))  # it is here now
    assert pair.at_b.contents(again) == written
    pair.at_b.update(releases=again)
    eventually(pair.rests)
    assert pair.b.metric("hotset_store_pages_pulled_total") == PAGES
    assert pair.b.metric("hotset_store_pulls_failed_total") == 0
    if transport != "mapped":
        assert pair.a.metric("hotset_store_pages_served_total") == PAGES
        lanes = [
            dict(labels)["lane"] for name, labels in pair.b.metrics() if name == "hotset_store_data_lanes"
        ]
        assert lanes
        assert all(lane.startswith(LANES[transport]) for lane in lanes)
        assert pair.a.metric("hotset_store_data_bytes_total", role="served", direction="sent") > 10**6
    for client in (pair.at_b, pair.at_a):
        client.detach()
        assert client.store.terminate() < 8


def test_what_is_here_is_not_pulled_and_what_follows_is_sealed_behind_it(
    stack: ExitStack, shm: Path, tmp_path: Path
) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp")
    written = pair.at_a.sequence_of(chain("x"), 1)
    pair.at_b.sequence_of(chain("x", 5), 1)
    found = pair.at_b.match(chain("x"))
    assert pair.at_b.contents(found) == written
    assert pair.b.metric("hotset_store_pages_pulled_total") == PAGES - 5


def test_nobody_is_asked_twice_at_once_for_what_nobody_has(
    stack: ExitStack, shm: Path, tmp_path: Path
) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp")
    for _ in range(5):
        assert pair.at_b.match(chain("nothing")) == []
    assert pair.b.metric("hotset_store_pulls_empty_total") == 1
    time.sleep(2.1)
    pair.at_a.sequence_of(chain("nothing"), 3)
    assert len(pair.at_b.match(chain("nothing"))) == PAGES


def test_a_full_store_pulls_what_it_has_room_for(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp")
    written = pair.at_a.sequence_of(chain("x"), 1)
    total = pair.b.stats().total_pages
    held = list(pair.at_b.update(total - 3).pages)
    found = pair.at_b.match(chain("x"))
    assert len(found) == 3
    assert pair.at_b.contents(found) == written[:3]
    assert pair.at_b.match(chain("x")[3:]) == []  # no room at all
    pair.at_b.update(releases=held)
    time.sleep(2.1)  # so that it is asked again
    assert pair.at_b.contents(pair.at_b.match(chain("x"))) == written


def test_pins_at_a_peer_go_back_whatever_became_of_the_pull(
    stack: ExitStack, shm: Path, tmp_path: Path
) -> None:
    """A pull that fails has pinned pages there; the peer must not keep them for a reader that lives on."""
    pair = Pair(stack, shm, tmp_path, "ucx", "--ucx-lanes=rdma")  # so that no byte ever comes
    pair.at_a.sequence_of(chain("x", 8), 1)
    pair.at_a.sequence_of(chain("y", 8), 2)
    for name in "xy":
        assert pair.at_b.match(chain(name, 8)) == []
        time.sleep(2.1)
    assert pair.b.metric("hotset_store_pulls_failed_total") == 2
    assert pair.a.stats().sealed_pages == 8  # of the last one alone
    assert pair.a.metric("hotset_store_sessions", kind="remote") == 2
    pair.at_b.detach()
    pair.b.terminate()
    pair.at_a.detach()
    assert pair.a.terminate() < 2.5  # it does not wait for a reader


def test_a_long_pull_ends_in_time_with_what_has_come(
    stack: ExitStack, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    asked: list[int] = []

    class Slow(MappedRequester):
        """A second a look at the clock, which is looked at twice a request."""

        def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
            asked.append(reply_bytes)
            return super().submit(body, reply_bytes, seconds)

    store = stack.enter_context(KvStore(shm / "a", "--arena-bytes=6MiB", logs=tmp_path)).ready()
    client = Client(store)
    written = client.sequence_of(chain("x"), 1)
    refs = PageRefs.of([PageRef(page.page, page.generation) for page in client.match(chain("x"))])
    ours = list(client.update(4).pages)
    source = MappedSource(store.arena, HEADER)
    face = Face(b"", Credentials(0, 0, b""))
    monkeypatch.setattr("services.kvstore.page_fetch.REQUEST_BYTES", 1)
    monkeypatch.setattr("services.kvstore.page_fetch.time", SimpleNamespace(monotonic=lambda: next(clock)))
    fetcher = PageFetcher(lambda face, seconds: Slow(source, 0, TransportCounters()))
    four = PageRefs(refs.pages[:4], refs.generations[:4])
    into = np.array([page.page for page in ours])
    fetched = fetcher.fetch(face, four, client.bytes, into, 14.0)
    assert fetched.error is None
    assert 0 < fetched.pages == len(asked) < 4
    assert client.contents(ours)[: fetched.pages] == written[: fetched.pages]
    fetcher.close()


def test_another_model_is_never_pulled_nor_laid_out(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair.__new__(Pair)
    pair.stack, pair.shm, pair.logs, pair.transport = stack, shm, tmp_path, "tcp"
    a = pair.start("a")
    b = pair.start("b", f"--peers={a.grpc}")
    assert Client(b).match(chain("x")) == []
    assert a.stats().total_pages == 0  # a reader lays nothing out
    other = process.Client(a, "other", "0" * 31 + "2", mapped=False)
    other.attach()
    time.sleep(2.1)
    assert Client(b, "again", "0" * 31 + "3").match(chain("x")) == []
    assert a.stats().sessions == 1


def test_a_reader_reads_only_what_it_holds(
    stack: ExitStack, shm: Path, tmp_path: Path, transport: str
) -> None:
    if transport == "mapped":
        pytest.skip("who may map an arena may read it")
    pair = Pair(stack, shm, tmp_path, transport)
    pair.at_a.sequence_of(chain("x"), 1)
    [page, *_] = pair.at_a.match(chain("x"))  # held by this session
    stranger = Client(pair.a, "stranger", "0" * 31 + "9")
    [face] = stranger.session.data_faces
    said = Credentials(stranger.session.session_id, stranger.session.epoch, stranger.session.data_key)
    requester: Requester = connect(transport, face.address, credentials=said)

    def ask(number: int, generation: int) -> bytes:
        body = write_request(PageRefs.of_numbers([number, generation]))
        with requester.wait(requester.submit(body, pair.at_a.layout.page_bytes, 5.0)) as payload:
            return bytes(payload)

    with pytest.raises(StateConflict, match="not held"):
        ask(page.page, page.generation)
    [mine, *_] = stranger.match(chain("x"))
    assert ask(mine.page, mine.generation) == pair.at_a.contents([page])[0]
    with pytest.raises(StateConflict, match="generation"):
        ask(mine.page, mine.generation + 1)
    opened = stranger.update(1).pages[0]
    with pytest.raises(StateConflict, match="not sealed"):
        ask(opened.page, opened.generation)
    requester.close()


FAST = (
    ("ucx-shm", signal.SIGSTOP, "during"),
    ("ucx-tcp", signal.SIGKILL, "between"),
)
FAULTS = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in product(TRANSPORTS, (signal.SIGKILL, signal.SIGSTOP), ("before", "during", "between"))
]


@pytest.mark.parametrize(("transport", "number", "moment"), FAULTS)
def test_a_peer_that_fails_costs_a_pull_and_no_more(
    stack: ExitStack, shm: Path, tmp_path: Path, transport: str, number: signal.Signals, moment: str
) -> None:
    pair = Pair(stack, shm, tmp_path, transport, "--pull-seconds=1.0")
    written = pair.at_a.sequence_of(chain("x"), 1)
    other = pair.at_a.sequence_of(chain("y", 3), 2)
    if moment == "between":
        first = pair.at_b.match(chain("y", 3))
        assert pair.at_b.contents(first) == other
        pair.at_b.update(releases=first)
    if moment == "during":  # as near as one gets from outside: the pages are asked for now
        ask = pair.at_b.store.stub.Match.future(
            pb.MatchRequest(
                session_id=pair.at_b.session.session_id,
                epoch=pair.at_b.session.epoch,
                page_hashes=chain("x"),
            ),
            timeout=10,
        )
        time.sleep(0.004)
        pair.a.signal(number)
        found = list(ask.result().pages)
    else:
        pair.a.signal(number)
        start = time.monotonic()
        found = pair.at_b.match(chain("x"))
        assert time.monotonic() - start < 2.5
    assert pair.at_b.contents(found) == written[: len(found)]
    pair.at_b.update(releases=found)
    eventually(lambda: pair.b.stats().open_pages == pair.b.stats().sealed_pages == 0)
    if number == signal.SIGSTOP:
        pair.a.signal(signal.SIGCONT)
    else:
        pair.a.process.wait()
        pair.a = pair.start("a", f"--listen={pair.a.grpc}")  # another life of the same arena
    time.sleep(2.1)  # a peer that failed is left alone for a while
    again = pair.at_b.match(chain("x"))
    assert pair.at_b.contents(again) == written
    pair.at_b.update(releases=again)


def test_a_killed_puller_leaves_no_page_behind(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp", "--pull-seconds=1.5")
    pair.at_a.sequence_of(chain("x"), 1)
    pair.at_b.store.stub.Match.future(
        pb.MatchRequest(
            session_id=pair.at_b.session.session_id, epoch=pair.at_b.session.epoch, page_hashes=chain("x")
        )
    )
    time.sleep(0.004)
    pair.b.signal(signal.SIGKILL)
    pair.b.process.wait()
    b = pair.start("b", "--lease-seconds=0.5")
    eventually(lambda: b.stats().open_pages == b.stats().sealed_pages == 0)


def test_an_arena_that_was_removed_is_no_source(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair(stack, shm, tmp_path, "mapped")
    pair.at_a.sequence_of(chain("x", 4), 1)
    assert len(pair.at_b.match(chain("x", 4))) == 4
    pair.at_a.sequence_of(chain("y", 4), 2)
    pair.a.arena.unlink()
    assert pair.at_b.match(chain("y", 4)) == []


def test_a_peer_needs_a_transport(shm: Path, tmp_path: Path) -> None:
    with KvStore(shm / "a", "--peers=127.0.0.1:1", logs=tmp_path) as store:
        assert "--data-transport" in store.refused()


def test_lanes_that_are_not_there_are_an_error_not_a_surprise(
    stack: ExitStack, shm: Path, tmp_path: Path
) -> None:
    pair = Pair(stack, shm, tmp_path, "ucx", "--ucx-tls=tcp,self", "--ucx-lanes=rdma")
    pair.at_a.sequence_of(chain("x", 4), 1)
    assert pair.at_b.match(chain("x", 4)) == []
    assert "UCX was to use rdma lanes and uses tcp/lo" in pair.b.log
