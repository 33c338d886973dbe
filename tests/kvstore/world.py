"""A store inside the test's process: its clock, its clients' locks, restarts; integrity checked all along."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.contract.file_header import FileHeader
from services.contract.file_lock import FileLock
from services.contract.planes import Plane, PlaneLayer
from services.kvstore.arena import PageHeaders
from services.kvstore.orders import (
    Attached,
    AttachOrder,
    ClientKind,
    Updated,
    UpdateOrder,
)
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.seals import Seal, Seals
from services.kvstore.store import Store

LEASE_SECONDS = 10.0
ARENA_BYTES = 4 * 2**20
# Two layers of 96 KiB a page: an arena of 4 MiB holds 10.
HEADER = FileHeader(64, bytes(32), (Plane("kv", (PlaneLayer(2, 4, 12288),) * 2),))
OTHER_HEADER = FileHeader(128, bytes(32), (Plane("kv", (PlaneLayer(2, 4, 24576),) * 2),))
PAGE_COUNT = 10
MAPPED, REMOTE = ClientKind.MAPPED, ClientKind.REMOTE


class FakeClock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Client:
    """One process of a client, as the store sees it: a token, a lock if it maps, the numbers of its calls."""

    def __init__(self, world: World, name: str, kind: ClientKind, token: str) -> None:
        self.world = world
        self.name = name
        self.kind = kind
        self.token = token
        self.sequence = 0
        self.session: Attached | None = None
        self.lock = FileLock(world.directory / "sessions" / f"{token}.lock")
        if kind is MAPPED:
            assert self.lock.acquire()

    def attach(
        self, header: FileHeader = HEADER, held: Sequence[PageRef] = (), *, reads_only: bool = False
    ) -> Attached:
        order = AttachOrder(self.name, self.kind, self.token, header, PageRefs.of(held), reads_only)
        self.session = self.world.store.attach(order)
        self.sequence = 0
        self.world.store.check_integrity()
        return self.session

    def update(
        self,
        allocate: int = 0,
        *,
        releases: Sequence[PageRef] = (),
        seals: Sequence[Seal] = (),
        sequence: int | None = None,
    ) -> Updated:
        assert self.session is not None
        order = UpdateOrder(
            self.sequence + 1 if sequence is None else sequence,
            PageRefs.of(releases),
            Seals.of(seals),
            allocate,
        )
        try:
            updated = self.world.store.update(self.session.session_id, self.session.epoch, order)
        finally:
            self.world.store.check_integrity()
        self.sequence = order.sequence
        return updated

    def allocate(self, count: int = 1) -> tuple[PageRef, ...]:
        return tuple(self.update(count).pages)

    def seal(self, page: PageRef, parent: PageRef | None = None, page_hash: bytes | None = None) -> PageRef:
        self.update(seals=[Seal(page, page_hash or bytes([page.page]) * 16, parent)])
        return page

    def match(self, *page_hashes: bytes) -> tuple[PageRef, ...]:
        assert self.session is not None
        try:
            return tuple(
                self.world.store.match(self.session.session_id, self.session.epoch, page_hashes, b"")
            )
        finally:
            self.world.store.check_integrity()

    def heartbeat(self) -> int:
        assert self.session is not None
        return self.world.store.heartbeat(self.session.session_id, self.session.epoch)

    def detach(self) -> int:
        assert self.session is not None
        try:
            return self.world.store.detach(self.session.session_id, self.session.epoch)
        finally:
            self.world.store.check_integrity()

    def die(self) -> None:
        """As the kernel does it: the lock is dropped, its file stays."""
        self.lock.release(remove=False)


class World:
    """The store of one arena directory, through its lives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = FakeClock()
        self.store = self._open()
        self.clients: list[Client] = []

    def _open(self) -> Store:
        return Store.open(self.directory, ARENA_BYTES, self.clock, LEASE_SECONDS)

    def client(self, name: str = "engine-0", kind: ClientKind = MAPPED, token: str | None = None) -> Client:
        made = Client(self, name, kind, token or f"{len(self.clients) + 1:032x}")
        self.clients.append(made)
        return made

    def pass_time(self, seconds: float) -> None:
        """Let time pass and the store look around."""
        self.clock.now += seconds
        self.store.tick()
        self.store.check_integrity()

    def restart(self) -> None:
        """As after kill -9: closing writes nothing, so the file is what a killed store leaves."""
        self.store.close(keep=True)
        self.store = self._open()
        self.store.check_integrity()

    def count(self, state: str) -> int:
        counts = self.store.snapshot().pages
        assert counts.free + counts.open + counts.sealed + counts.cached == counts.total
        number: int = getattr(counts, state)
        return number

    def headers(self) -> PageHeaders:
        """What the file says of every page."""
        return self.store._arena.page_headers()

    def end(self) -> None:
        self.store.check_integrity()
        for client in self.clients:
            client.die()
        self.store.close(keep=False)
        assert not self.directory.exists()
