"""Pieces of a real store's pages, read and written by a decoder's RemoteArena over every transport."""

from __future__ import annotations

import random
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.contract.errors import Unavailable
from services.contract.slot_request import Pieces, Region, regions_of
from services.contract.transport.counters import TransportCounters
from services.contract.transport.faults import Fault, TransportFault
from services.contract.transport.frame import Credentials
from services.contract.transport.protocol import Capabilities, Reply, Requester, Ticket
from services.decoder.kv.remote_arena import Connection, RemoteArena
from tests.contract.transport.peer import REMOTE, connect
from tests.kvstore.pair import LANES, Client, flags
from tests.kvstore.process import KvStore, eventually

SECONDS = 30.0


class Decoder(Client):
    """A client whose bytes go over a transport; what the arena really holds is looked up in its file."""

    def __init__(self, store: KvStore, transport: str) -> None:
        super().__init__(store, token=secrets.token_hex(16))  # takes the place of the test before
        self.transport = transport
        self.counters = TransportCounters()
        self.lives: dict[int, int] = {}
        self.connections = 0
        self.wrap: Callable[[Requester], Requester] = lambda requester: requester
        self.regions = [region for region in regions_of(self.layout) if region.page_bytes]

    @property
    def credentials(self) -> Credentials:
        session = self.session
        return Credentials(session.session_id, session.epoch, session.data_key)

    def connect(self, seconds: float) -> Connection:
        self.connections += 1
        address = self.session.data_faces[0].address
        made = connect(self.transport, address, self.counters, self.credentials, seconds)
        return Connection(self.wrap(made), self.session.epoch)

    def arena(self, seconds: float = SECONDS) -> RemoteArena:
        lives = self.lives
        return RemoteArena(
            self.layout, self.connect, lambda pages: [lives[p] for p in pages.tolist()], seconds
        )

    def take(self, count: int) -> list[int]:
        pages = list(self.update(count).pages)
        assert len(pages) == count
        self.lives.update((page.page, page.generation) for page in pages)
        return [page.page for page in pages]

    def whole(self, page: int) -> bytes:
        """A page as the arena holds it: region after region."""
        out = bytearray(self.layout.page_bytes)
        self.bytes.pack(np.array([page]), memoryview(out))
        return bytes(out)


@pytest.fixture(params=REMOTE)
def transport(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], KvStore]]:
    """One for each transport, started when first asked for."""
    made: dict[str, KvStore] = {}
    with ExitStack() as stack:
        shm = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotset-test-", dir="/dev/shm")))

        def of(transport: str) -> KvStore:
            if transport not in made:
                more = ("--arena-bytes=6MiB", "--lease-seconds=600", *flags(transport))
                store = KvStore(shm / transport, *more, logs=tmp_path_factory.mktemp(transport))
                made[transport] = stack.enter_context(store).ready()
            return made[transport]

        yield of


@pytest.fixture
def store(stores: Callable[[str], KvStore], transport: str) -> KvStore:
    return stores(transport)


def _some(dice: random.Random, arena: RemoteArena, pages: list[int], regions: list[Region]) -> list[Pieces]:
    """Pieces at random, no byte twice."""
    found = []
    for page in pages:
        for region in dice.sample(regions, dice.randint(1, len(regions))):
            size = dice.choice((1, 16, 100, 512, 1152, dice.randint(1, region.page_bytes)))
            size = min(size, region.page_bytes)
            offset = np.array([dice.randint(0, region.page_bytes - size)])
            found.append(arena.pieces(region.plane, region.layer, np.array([page]), offset, size))
    dice.shuffle(found)
    return found


def test_the_same_bytes_at_any_size_and_place(store: KvStore, transport: str) -> None:
    decoder, dice = Decoder(store, transport), random.Random(3)
    pages = decoder.take(store.stats().total_pages)
    starts = {}
    at = 0
    for region in decoder.regions:
        starts[region.number] = at
        at += region.page_bytes
    shadow = {page: bytearray(decoder.whole(page)) for page in pages}
    with closing(decoder.arena()) as arena:
        assert all(lane.startswith(LANES[transport]) for lane in arena.open())
        for number in range(12):
            some = _some(dice, arena, pages if number % 4 == 0 else dice.sample(pages, 3), decoder.regions)
            for asked in some:
                page, _, region, offset, size = asked[0].tolist()
                data = dice.randbytes(size)
                arena.stage(asked, torch.frombuffer(bytearray(data), dtype=torch.uint8))
                begin = starts[region] + offset
                shadow[page][begin : begin + size] = data
            arena.settle()
            found = bytes(arena.read(np.concatenate(some)).numpy())
            expected = b""
            for page, _, region, offset, size in np.concatenate(some).tolist():
                expected += shadow[page][starts[region] + offset : starts[region] + offset + size]
            assert found == expected
        everything = [
            arena.pieces(
                region.plane, region.layer, np.array(pages), np.zeros(len(pages), np.int64), region.page_bytes
            )
            for region in decoder.regions
        ]
        found = bytes(arena.read(np.concatenate(everything)).numpy())  # more than one answer holds
    assert {page: decoder.whole(page) for page in pages} == shadow
    expected = b""
    for region in decoder.regions:
        begin = starts[region.number]
        expected += b"".join(shadow[page][begin : begin + region.page_bytes] for page in pages)
    assert found == expected
    assert decoder.connections == 1
    assert store.metric("hotset_store_pieces_written_total") > 0
    assert store.metric("hotset_store_pieces_read_total") > 0


def _errors(store: KvStore, kind: str) -> float:
    return store.metric("hotset_store_data_errors_total", role="served", kind=kind)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_what_is_refused_is_counted(store: KvStore, transport: str) -> None:
    decoder = Decoder(store, transport)
    (page,) = decoder.take(1)
    earlier = {kind: _errors(store, kind) for kind in ("refused", "key", "generation", "session")}

    def errors(kind: str) -> float:
        return _errors(store, kind) - earlier[kind]

    with closing(decoder.arena(10.0)) as arena:
        here = arena.pieces("kv", 0, np.array([page]), np.array([0]), 16)
        arena.stage(here, torch.arange(16, dtype=torch.uint8))
        arena.settle()
        before = decoder.whole(page)
        decoder.lives[page] += 1
        later = arena.pieces("kv", 0, np.array([page]), np.array([0]), 16)
        with pytest.raises(Unavailable, match=r"no longer has what was computed .*generation"):
            arena.read(later)
        arena.stage(later, torch.zeros(16, dtype=torch.uint8))
        with pytest.raises(Unavailable, match=r"no longer has what was computed .*generation"):
            arena.settle()
        arena.settle()  # nothing of that is left
        assert bytes(arena.read(here).numpy()) == bytes(range(16))
    assert errors("refused") == 2
    session = decoder.session
    for kind, change in (
        ("key", {"key": bytes(16)}),
        ("generation", {"generation": session.epoch + 1}),
        ("session", {"session": session.session_id ^ 1}),
    ):
        wrong = replace(decoder.credentials, **change)
        with closing(connect(transport, session.data_faces[0].address, None, wrong, 10.0)) as requester:
            with pytest.raises(TransportFault) as refused:
                requester.wait(requester.submit(bytes(8), 100, 10.0))
            assert refused.value.fault.value == kind
        assert errors(kind) == 1
    assert decoder.whole(page) == before


def test_a_refusal_among_several_parts_hinders_nothing(
    store: KvStore, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts that were under way beside the one refused are never waited for."""
    monkeypatch.setattr("services.decoder.kv.remote_arena._ANSWER_BYTES", 4096)
    decoder = Decoder(store, transport)
    pages = decoder.take(10)
    with closing(decoder.arena()) as arena:

        def pieces() -> Pieces:
            return arena.pieces("kv", 0, np.array(pages), np.zeros(len(pages), np.int64), 4096)

        arena.stage(pieces(), torch.full((len(pages) * 4096,), 7, dtype=torch.uint8))
        arena.settle()
        decoder.lives[pages[0]] += 1
        stale = pieces()
        decoder.lives[pages[0]] -= 1
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"no longer has what was computed .*generation"):
                arena.read(stale)
            assert set(bytes(arena.read(pieces()).numpy())) == {7}
            arena.stage(pieces(), torch.full((len(pages) * 4096,), 7, dtype=torch.uint8))
            arena.settle()


def test_what_a_step_staged_before_it_failed_is_dropped(store: KvStore, transport: str) -> None:
    decoder = Decoder(store, transport)
    (page,) = decoder.take(1)
    with closing(decoder.arena()) as arena:
        here = arena.pieces("kv", 0, np.array([page]), np.array([0]), 4)
        for number, fails in ((1, False), (2, True)):
            arena.stage(here, torch.full((4,), number, dtype=torch.uint8))
            if fails:
                arena.drop()
            arena.settle()
    assert decoder.whole(page)[:4] == bytes([1] * 4)


class Breaking:
    """A requester whose connection breaks when an answer comes, every second time: the request was done."""

    def __init__(self, requester: Requester, count: list[int]) -> None:
        self._requester, self._count = requester, count
        self.capabilities: Capabilities = requester.capabilities
        self.lanes = requester.lanes

    def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
        return self._requester.submit(body, reply_bytes, seconds)

    def wait(self, ticket: Ticket) -> Reply:
        reply = self._requester.wait(ticket)
        self._count[0] += 1
        if self._count[0] % 2:
            reply.release()
            raise TransportFault(Fault.LOST, "the cable is out")
        return reply

    def close(self) -> None:
        self._requester.close()


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_what_was_done_and_not_answered_is_asked_again(store: KvStore, transport: str) -> None:
    decoder = Decoder(store, transport)
    pages = decoder.take(20)
    count = [0]
    decoder.wrap = lambda requester: Breaking(requester, count)
    with closing(decoder.arena()) as arena:
        for number in range(1, 4):
            size = decoder.regions[0].page_bytes
            here = arena.pieces("kv", 0, np.array(pages), np.zeros(len(pages), np.int64), size)
            data = torch.full((len(pages) * size,), number, dtype=torch.uint8)
            arena.stage(here, data)  # longer than one write
            arena.settle()
            assert torch.equal(arena.read(here), data)
    assert decoder.connections > 3


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_late_copy_of_a_write_changes_nothing(store: KvStore, transport: str) -> None:
    """A store that stops may wake to a write's first copy after its repetition and the next one."""
    decoder = Decoder(store, transport)
    (page,) = decoder.take(1)
    kept: list[bytes] = []

    class Keeping(Breaking):
        def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
            kept.append(bytes(body))
            return super().submit(body, reply_bytes, seconds)

    count = [1]  # the first answer is lost
    decoder.wrap = lambda requester: Keeping(requester, count)
    with closing(decoder.arena()) as arena:
        here = arena.pieces("kv", 0, np.array([page]), np.array([0]), 4)
        for number in (1, 2, 3):
            arena.stage(here, torch.full((4,), number, dtype=torch.uint8))
            arena.settle()
    with closing(decoder.connect(10.0).requester) as late:
        count[0] = 1
        with late.wait(late.submit(kept[0], 0, 10.0)) as payload:
            assert not payload
    assert decoder.whole(page)[:4] == bytes([3] * 4)


@pytest.mark.parametrize("moment", ["before", "in", "between"])
@pytest.mark.parametrize("transport", ["tcp", pytest.param("ucx-shm", marks=pytest.mark.slow)], indirect=True)
def test_a_store_that_stops(store: KvStore, transport: str, moment: str) -> None:
    """The call ends in time with an error, or with what is right; then all goes on over a new connection."""
    decoder = Decoder(store, transport)
    pages = decoder.take(20)
    with closing(decoder.arena(1.5)) as arena:
        size = decoder.regions[0].page_bytes
        here = arena.pieces("kv", 0, np.array(pages), np.zeros(len(pages), np.int64), size)

        def write(number: int) -> bool:
            arena.stage(here, torch.full((len(pages) * size,), number, dtype=torch.uint8))
            try:
                arena.settle()
            except Unavailable:
                return False
            return True

        if moment != "before":
            eventually(lambda: write(1))
        stop = threading.Timer(0.001 if moment == "in" else 0.0, lambda: store.signal(signal.SIGSTOP))
        stop.start()
        if moment != "in":
            stop.join()
        began = time.monotonic()
        done = write(2)
        assert time.monotonic() - began < 60
        stop.join()
        if moment != "in":
            assert not done
        store.signal(signal.SIGCONT)
        eventually(lambda: write(3), 60)
        assert torch.equal(arena.read(here), torch.full((len(pages) * size,), 3, dtype=torch.uint8))
    assert all(set(decoder.whole(page)[:size]) == {3} for page in pages)
