"""Which of several peers a pull goes to: all are asked at once, and what they say is no more than a hint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.contract.errors import HotsetError, Unavailable
from services.contract.file_header import FileHeader
from services.contract.transport.counters import TransportCounters
from services.contract.transport.tcp_requester import TcpRequester
from services.contract.wire_security import NO_SECURITY
from services.kvstore.page_fetch import PageFetcher
from services.kvstore.peer_link import PeerLink
from services.kvstore.peer_links import PeerLinks
from services.kvstore.peers import Peers
from tests.kvstore.pair import HEADER, Client, flags
from tests.kvstore.pair import chain as chain_of
from tests.kvstore.process import KvStore
from tests.kvstore.world import World

SECONDS = 60.0  # for a pull; no outcome here depends on it
PAGES = 8  # the asking store's arena holds 11
Answer = Callable[["Link"], Awaitable[int | None]]


def chain(name: str, length: int = PAGES) -> list[bytes]:
    return chain_of(name, length)


class Link(PeerLink):
    """A link whose peer says how much it has as the test wants; what it gives is real."""

    def __init__(self, address: str, said: Answer) -> None:
        super().__init__(address, "asker", NO_SECURITY)
        self._says = said
        self.matches = 0

    async def known(self, header: FileHeader, page_hashes: Sequence[bytes], seconds: float) -> int:
        said = await self._says(self)
        return await super().known(header, page_hashes, seconds) if said is None else said

    async def match(self, header: FileHeader, page_hashes: Sequence[bytes], seconds: float):  # type: ignore[no-untyped-def]  # as in PeerLink
        self.matches += 1
        return await super().match(header, page_hashes, seconds)


async def honest(link: Link) -> None:
    """What the peer really says."""


@pytest.fixture
def stores(shm: Path, tmp_path: Path) -> Iterator[list[Client]]:
    """Clients of three that know of no other."""
    with ExitStack() as stack:
        made = [KvStore(shm / name, "--arena-bytes=6MiB", *flags("tcp"), logs=tmp_path) for name in "abc"]
        for store in made:
            stack.enter_context(store)
        yield [Client(store.ready()) for store in made]


def fill(world: World, said: Mapping[str, Answer], name: str = "x") -> tuple[Peers, dict[str, Link], int]:
    """Have the world's store ask the peers at these addresses; how many pages are here then."""
    client = world.client("engine")
    client.attach(HEADER)
    links: dict[str, Link] = {}

    def dial(address: str) -> Link:
        return links.setdefault(address, Link(address, said[address]))

    async def run() -> tuple[Peers, int]:
        fetcher = PageFetcher(
            lambda face, seconds: TcpRequester(face.address, face.credentials, TransportCounters(), seconds)
        )
        peers = Peers(world.store.parts, PeerLinks(dial, list(said)), "tcp", fetcher, SECONDS)
        await peers.fill(chain(name))
        known = world.store.parts.space.table.known(chain(name))
        await peers.close()
        return peers, known

    peers, known = asyncio.run(run())
    world.store.check_integrity()
    return peers, links, known


def test_the_one_that_has_most_is_asked_for_it_and_the_others_are_left_alone(
    world: World, stores: list[Client]
) -> None:
    stores[0].sequence_of(chain("x", 4), 1)
    stores[1].sequence_of(chain("x"), 1)
    peers, links, known = fill(world, {at.store.grpc: honest for at in stores})
    assert known == peers.counters.pages == PAGES
    assert [link.matches for link in links.values()] == [0, 1, 0]
    assert (peers.counters.empty, peers.counters.failures) == (1, 0)


def test_what_one_lacks_comes_from_the_next(world: World, stores: list[Client]) -> None:
    whole = stores[1].sequence_of(chain("x"), 1)
    stores[0].sequence_of(chain("x", 4), 1)

    async def boasts(link: Link) -> int:
        return PAGES

    async def modest(link: Link) -> int:
        return 1

    peers, links, known = fill(world, {stores[0].store.grpc: boasts, stores[1].store.grpc: modest})
    assert len(whole) == known == peers.counters.pages == PAGES
    assert [link.matches for link in links.values()] == [1, 1]


def test_a_wrong_word_costs_a_question_and_no_more(world: World, stores: list[Client]) -> None:
    stores[2].sequence_of(chain("x"), 1)

    async def lies(link: Link) -> int:
        return 10**6

    peers, links, known = fill(
        world, {stores[0].store.grpc: lies, stores[1].store.grpc: lies, stores[2].store.grpc: honest}
    )
    assert known == PAGES
    assert [link.matches for link in links.values()] == [1, 1, 1]
    assert (peers.counters.empty, peers.counters.failures) == (2, 0)


def test_all_are_asked_at_once_and_who_fails_rests(world: World, stores: list[Client]) -> None:
    stores[2].sequence_of(chain("x"), 1)
    here: list[Link] = []
    all_here = asyncio.Event()

    async def together(link: Link) -> None:
        """Wait until everybody has been asked."""
        here.append(link)
        if len(here) == len(stores):
            all_here.set()
        await all_here.wait()
        if link.address == stores[0].store.grpc:
            raise Unavailable("no answer")

    start = time.monotonic()
    peers, links, known = fill(world, {at.store.grpc: together for at in stores})
    assert known == PAGES
    assert time.monotonic() - start < SECONDS
    assert peers.counters.failures == 1
    assert links[stores[0].store.grpc].matches == 0


def test_one_alone_is_not_asked_twice(world: World, stores: list[Client]) -> None:
    stores[0].sequence_of(chain("x"), 1)

    async def never(link: Link) -> int:
        raise HotsetError("it is asked for pages at once")

    peers, _, known = fill(world, {stores[0].store.grpc: never})
    assert (known, peers.counters.failures) == (PAGES, 0)
