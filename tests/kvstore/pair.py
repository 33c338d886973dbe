"""Two real stores, of which one fetches from the other, and clients that fill and compare pages."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hotset.v1 import kvstore_pb2 as pb

from services.contract.file_header import FileHeader
from services.contract.layout import ArenaLayout
from services.contract.planes import Plane, PlaneLayer, planes_to_wire
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_refs import PageRef
from services.kvstore.seals import Seal
from tests.kvstore import process
from tests.kvstore.process import KvStore, token_in
from tests.nixl import marks_of

NIXL = ("nixl-shm", "nixl-tcp")
NAMES = ("mapped", "tcp", "ucx-shm", "ucx-tcp", *NIXL)
TRANSPORTS = tuple(pytest.param(name, marks=marks_of(name, slow=name == "nixl-shm")) for name in NAMES)
UCX = {
    "ucx-shm": ("--ucx-tls=sm,self", "--ucx-lanes=shm"),
    "ucx-tcp": ("--ucx-tls=tcp,self", "--ucx-lanes=tcp"),
    "nixl-shm": ("--ucx-tls=tcp,sm,self", "--ucx-lanes=shm"),
    "nixl-tcp": ("--ucx-tls=tcp,sm,self", "--ucx-lanes=tcp"),
}
LANES = {
    "tcp": ("tcp/127",),
    "ucx-shm": ("sysv/", "posix/"),
    "ucx-tcp": ("tcp/lo",),
    "nixl-shm": ("may/sm",),
    "nixl-tcp": ("may/tcp",),
}
PAGES = 12
REST_SECONDS = 2.1  # a bit longer than a store leaves a peer alone that failed or had nothing
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
        pages = self.update(len(hashes)).pages
        contents = [
            random.Random(f"{seed} {at}").randbytes(self.layout.page_bytes) for at in range(len(pages))
        ]
        for page, content in zip(pages, contents, strict=True):
            self.bytes.unpack(np.array([page.page]), memoryview(content))
        seals = [
            Seal(page, page_hash, pages[at - 1] if at else None)
            for at, (page, page_hash) in enumerate(zip(pages, hashes, strict=True))
        ]
        self.update(seals=seals)
        self.update(releases=pages)
        return contents

    def contents(self, pages: Sequence[PageRef]) -> list[bytes]:
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
        wire = token_in(self.logs / "wire") if self.transport in NIXL else None
        told = ("--arena-bytes=6MiB", *flags(self.transport), *more)
        store = KvStore(self.shm / name, *told, logs=self.logs, wire=wire)
        return self.stack.enter_context(store).ready()

    def rests(self) -> bool:
        """Nothing is held at either end but by the clients."""
        stats = [store.stats() for store in (self.a, self.b)]
        return all(now.open_pages == now.sealed_pages == 0 for now in stats)


def asked(client: Client, name: str, length: int = PAGES) -> Any:
    session = client.session
    return client.store.stub.Match.future(
        pb.MatchRequest(session_id=session.session_id, epoch=session.epoch, page_hashes=chain(name, length)),
        timeout=60,
    )
