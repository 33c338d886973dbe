"""A pull takes room as pages come, nothing of a layout that has gone, and keeps one connection a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.contract.file_header import FileHeader
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.protocol import Requester, Ticket
from services.contract.transport.tcp_requester import TcpRequester
from services.contract.wire_security import NO_SECURITY
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_fetch import Face, PageFetcher
from services.kvstore.page_refs import PageRefs
from services.kvstore.peer_link import PeerLink
from services.kvstore.peer_links import PeerLinks
from services.kvstore.peers import Peers
from tests.kvstore.pair import HEADER, Client, chain, flags
from tests.kvstore.process import KvStore
from tests.kvstore.world import Client as Local
from tests.kvstore.world import World

SECONDS = 60.0  # for a pull; no outcome here depends on it
PAGES = 8  # the asking store's arena holds 11
BATCH = 3


@pytest.fixture
def source(shm: Path, tmp_path: Path) -> Iterator[Client]:
    with KvStore(shm / "a", "--arena-bytes=6MiB", *flags("tcp"), logs=tmp_path) as store:
        yield Client(store.ready())


@pytest.fixture(autouse=True)
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page a request, and few requests."""
    monkeypatch.setattr("services.kvstore.page_fetch.REQUEST_BYTES", 1)
    monkeypatch.setattr("services.kvstore.page_fetch._BATCH_REQUESTS", BATCH)


def tcp(face: Face, seconds: float) -> TcpRequester:
    return TcpRequester(face.address, face.credentials, TransportCounters(), seconds)


def nobody(face: Face, seconds: float) -> Requester:
    raise TransportFault(Fault.LOST, "nobody listens")


class Link(PeerLink):
    """Has something happen between the peer's word and the first byte."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    async def match(self, header: FileHeader, page_hashes: Sequence[bytes], seconds: float) -> PageRefs:
        found = await super().match(header, page_hashes, seconds)
        self.meanwhile()
        return found


def test_a_peer_that_was_restarted_or_has_left_leaves_no_connection(
    world: World, shm: Path, tmp_path: Path
) -> None:
    """Nobody asked while it was away, so nothing failed; its data plane has another address afterwards."""
    world.client().attach(HEADER)
    made: list[TcpRequester] = []

    def connect(face: Face, seconds: float) -> TcpRequester:
        made.append(tcp(face, seconds))
        return made[-1]

    def connected() -> list[bool]:
        return [requester._socket.fileno() >= 0 for requester in made]

    async def run() -> None:
        listen, links = "127.0.0.1:0", PeerLinks(lambda address: Link(address, "asker", NO_SECURITY), [])
        peers = Peers(world.store.parts, links, "tcp", PageFetcher(connect), SECONDS)
        for name in "xy":
            more = ("--arena-bytes=6MiB", f"--listen={listen}", *flags("tcp"))
            with KvStore(shm / name, *more, logs=tmp_path) as store:
                source, listen = Client(store.ready()), store.grpc
                source.sequence_of(chain(name, 2), 1)
                await peers.follow([listen])
                # A channel may need a while to notice that its peer is back.
                async with asyncio.timeout(SECONDS):
                    while world.store.parts.space.table.known(chain(name, 2)) < 2:
                        await peers.fill(chain(name, 2))
                        await asyncio.sleep(0.05)
        assert connected() == [False] * (len(made) - 1) + [True]
        await peers.follow([])
        assert not any(connected())
        await peers.close()

    asyncio.run(run())
    assert len(made) >= 2


def pull(
    world: World,
    source: Client,
    connect: Callable[[Face, float], Requester] = tcp,
    meanwhile: Callable[[], object] = lambda: None,
) -> Peers:
    async def run() -> Peers:
        link = Link(source.store.grpc, "asker", NO_SECURITY)
        link.meanwhile = meanwhile
        links = PeerLinks(lambda address: link, [link.address])
        peers = Peers(world.store.parts, links, "tcp", PageFetcher(connect), SECONDS)
        await peers.fill(chain("x", PAGES))
        await peers.close()
        return peers

    peers = asyncio.run(run())
    world.store.check_integrity()
    return peers


def full_of_cache(world: World) -> Local:
    """A client here; every page of the arena is sealed, and held by nobody."""
    client = world.client()
    client.attach(HEADER)
    pages = client.allocate(world.count("total"))
    for page in pages:
        client.seal(page)
    client.update(releases=pages)
    assert world.count("cached") == len(pages)
    return client


def test_batch_after_batch_is_one_sequence(world: World, source: Client) -> None:
    written = source.sequence_of(chain("x", PAGES), 1)
    client = full_of_cache(world)
    assert pull(world, source).counters.pages == PAGES
    found = client.match(*chain("x", PAGES))
    layout = world.store.parts.arena.layout
    assert layout is not None
    packed = bytearray(layout.page_bytes)
    for page, content in zip(found, written, strict=True):
        PageBytes(world.store.parts.arena.buffer, layout).pack(np.array([page.page]), memoryview(packed))
        assert packed == content


def test_a_peer_that_gives_nothing_costs_a_batch(world: World, source: Client) -> None:
    source.sequence_of(chain("x", PAGES), 1)
    full_of_cache(world)
    assert pull(world, source, nobody).counters.failures == 1
    assert world.store.snapshot().evicted_pages <= BATCH


def test_a_peer_that_stops_giving_costs_what_it_gave_and_a_batch(world: World, source: Client) -> None:
    source.sequence_of(chain("x", PAGES), 1)
    full_of_cache(world)
    answers = iter(range(BATCH + 1))

    class Tiring(TcpRequester):
        def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
            with suppress(StopIteration):
                next(answers)
                return super().submit(body, reply_bytes, seconds)
            raise TransportFault(Fault.LOST, "no more")

    def connect(face: Face, seconds: float) -> Tiring:
        return Tiring(face.address, face.credentials, TransportCounters(), seconds)

    peers = pull(world, source, connect)
    assert (peers.counters.pages, peers.counters.failures) == (BATCH, 1)
    assert world.store.snapshot().evicted_pages <= 2 * BATCH


def test_an_arena_laid_out_anew_meanwhile_gets_nothing(world: World, source: Client) -> None:
    """The same planes, another checkpoint: the bytes would fit, and be wrong."""
    source.sequence_of(chain("x", PAGES), 1)
    client = world.client()
    client.attach(HEADER)

    def meanwhile() -> None:
        client.detach()
        world.client("another").attach(replace(HEADER, fingerprint=bytes([1] * 32)))

    peers = pull(world, source, meanwhile=meanwhile)
    assert (peers.counters.pages, peers.counters.failures) == (0, 0)
    assert world.count("free") == world.count("total")
    assert not world.headers()["state"].any()
