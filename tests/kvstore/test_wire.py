"""What a client may send wrong, over a real wire: the right status each, and the store as it was."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from hotset.v1 import kvstore_pb2 as pb
from hotset.v1 import kvstore_pb2_grpc as rpc

from services.contract.channel import MAX_MESSAGE_BYTES
from services.contract.errors import (
    HotsetError,
    InvalidRequest,
    NoRoom,
    NotFound,
    SetupError,
    StaleReference,
    StateConflict,
)
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.seals import Seal, Seals
from services.kvstore.wire import refs_to_wire
from tests.kvstore.process import Client, KvStore, error_of, eventually, seals_to_wire
from tests.kvstore.world import PAGE_COUNT


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvStore]:
    directory = Path(tempfile.mkdtemp(prefix="hotset-test-", dir="/dev/shm"))
    with KvStore(directory / "arena", logs=tmp_path_factory.mktemp("logs")) as made:
        yield made.ready()
    shutil.rmtree(directory)


@pytest.fixture
def client(store: KvStore) -> Iterator[Client]:
    with Client(store, "engine-0", f"{random.getrandbits(128):032x}", mapped=True) as made:
        made.attach()
        yield made
        made.detach()


def attach_with(change: Callable[[pb.AttachRequest], object]) -> Callable[[Client], object]:
    def call(client: Client) -> object:
        request = client.request()
        request.client_name, request.kind = "other", pb.CLIENT_KIND_REMOTE
        request.session_token = f"{1:032x}"
        change(request)
        return client.store.stub.Attach(request, timeout=60)

    return call


def huge_layers(request: pb.AttachRequest) -> None:
    for layer in request.planes[0].layers:
        layer.groups = layer.entries = 2**32 - 1
        layer.entry_bytes = 2**32 - 16


def hold(request: pb.AttachRequest, page: PageRef) -> None:
    request.held_pages.CopyFrom(refs_to_wire(PageRefs.of([page])))


ATTACHES: dict[str, tuple[Callable[[pb.AttachRequest], object], type[HotsetError]]] = {
    "no kind": (lambda r: r.ClearField("kind"), InvalidRequest),
    "an unknown kind": (lambda r: r.MergeFromString(b"\x10\x63"), InvalidRequest),
    "no name": (lambda r: r.ClearField("client_name"), InvalidRequest),
    "a token that is a path": (lambda r: setattr(r, "session_token", "../" * 10 + "ab"), InvalidRequest),
    "no planes": (lambda r: r.ClearField("planes"), InvalidRequest),
    "an unknown plane": (lambda r: setattr(r.planes[0], "name", "weights"), InvalidRequest),
    "17 bytes an entry": (lambda r: setattr(r.planes[0].layers[0], "entry_bytes", 17), InvalidRequest),
    "a short fingerprint": (lambda r: setattr(r, "model_fingerprint", b"x"), InvalidRequest),
    "pages of no tokens": (lambda r: r.ClearField("page_tokens"), InvalidRequest),
    "another model": (lambda r: setattr(r, "model_fingerprint", b"x" * 32), StateConflict),
    "another page size": (lambda r: setattr(r, "page_tokens", 128), StateConflict),
    "one layer less": (lambda r: r.planes[0].layers.pop(), StateConflict),
    "pages larger than the world": (huge_layers, StateConflict),
    "a mapped client without its lock": (lambda r: setattr(r, "kind", pb.CLIENT_KIND_MAPPED), StateConflict),
    "a page it never had": (lambda r: hold(r, PageRef(0, 10**9)), StaleReference),
    "a page that is not there": (lambda r: hold(r, PageRef(PAGE_COUNT, 0)), InvalidRequest),
    "a page without a generation": (lambda r: r.held_pages.pages.append(0), InvalidRequest),
}


@pytest.mark.parametrize(("change", "kind"), ATTACHES.values(), ids=ATTACHES)
def test_attaches(
    client: Client, change: Callable[[pb.AttachRequest], object], kind: type[HotsetError]
) -> None:
    assert type(error_of(lambda: attach_with(change)(client))) is kind
    assert client.store.stats().sessions == 1


def send(
    client: Client, sequence: int = 0, releases: pb.PageRefs | None = None, seals: pb.Seals | None = None
) -> pb.UpdateReply:
    return client.store.stub.Update(
        pb.UpdateRequest(
            session_id=client.session.session_id,
            epoch=client.session.epoch,
            sequence=sequence or client.sequence + 1,
            releases=releases,
            seals=seals,
        )
    )


def told(page: PageRef, *tokens: bytes) -> pb.Seals:
    """A good seal, with a column of tokens."""
    seals = seals_to_wire(Seals.of([Seal(page, bytes(16), None)]))
    del seals.tokens[:]
    seals.tokens.extend(tokens)
    return seals


UPDATES: dict[str, tuple[Callable[[Client, PageRef], object], type[HotsetError]]] = {
    "a stale page": (
        lambda c, p: c.update(1, releases=[PageRef(p.page, p.generation - 1)]),
        StaleReference,
    ),
    "a page that is not there": (
        lambda c, p: c.update(1, releases=[p, PageRef(2**32 - 1, 0)]),
        InvalidRequest,
    ),
    "a page twice": (lambda c, p: c.update(1, releases=[p, p]), StateConflict),
    "an empty reference": (lambda c, p: c.update(1, releases=[PageRef(0, 0)]), StaleReference),
    "a seal of nothing": (
        lambda c, p: c.update(1, seals=[Seal(PageRef(0, 0), bytes(16), None)]),
        StaleReference,
    ),
    "a seal without a hash": (lambda c, p: c.update(1, seals=[Seal(p, b"", None)]), InvalidRequest),
    "a seal with its own parent": (
        lambda c, p: c.update(1, seals=[Seal(p, bytes(16), p)]),
        StateConflict,
    ),
    "a page behind none": (
        lambda c, p: c.update(1, seals=[Seal(p, bytes(16), PageRef(2**32 - 2, 0))]),
        InvalidRequest,
    ),
    "a generation too many": (
        lambda c, p: send(c, releases=pb.PageRefs(pages=[p.page], generations=[p.generation, 0])),
        InvalidRequest,
    ),
    "a seal without its parent": (
        lambda c, p: send(c, seals=pb.Seals(pages=refs_to_wire(PageRefs.of([p])), page_hashes=[bytes(16)])),
        InvalidRequest,
    ),
    "tokens of fewer pages than are sealed": (
        lambda c, p: send(c, seals=told(p, bytes(256), bytes(256))),
        InvalidRequest,
    ),
    "a cut token": (
        lambda c, p: send(c, seals=told(p, bytes(255))),
        InvalidRequest,
    ),
    "an empty request": (lambda c, p: c.store.stub.Update(pb.UpdateRequest()), NotFound),
    "an old epoch": (
        lambda c, p: c.store.stub.Update(
            pb.UpdateRequest(session_id=c.session.session_id, epoch=c.session.epoch - 1, sequence=2)
        ),
        StaleReference,
    ),
    "a skipped number": (
        lambda c, p: send(c, sequence=9),
        StateConflict,
    ),
    "a message past the limit": (
        lambda c, p: c.update(seals=[Seal(p, bytes(MAX_MESSAGE_BYTES + 1), None)]),
        NoRoom,
    ),
    "a match of an empty hash": (
        lambda c, p: c.store.stub.Match(
            pb.MatchRequest(
                session_id=c.session.session_id, epoch=c.session.epoch, page_hashes=[bytes(16), b""]
            )
        ),
        InvalidRequest,
    ),
    "a hash of a megabyte": (
        lambda c, p: c.update(seals=[Seal(p, bytes(2**20), None)]),
        InvalidRequest,
    ),
}


@pytest.mark.parametrize(("call", "kind"), UPDATES.values(), ids=UPDATES)
def test_updates(client: Client, call: Callable[[Client, PageRef], object], kind: type[HotsetError]) -> None:
    page = client.update(1).pages[0]
    client.update(releases=[page])  # so that page 0, generation 0 is surely stale
    page = client.update(1).pages[0]
    with grpc.insecure_channel(client.store.grpc) as unlimited:
        client.store.stub, limited = rpc.KvStoreStub(unlimited), client.store.stub
        error = error_of(lambda: call(client, page))
        client.store.stub = limited
    assert type(error) is kind
    assert client.store.stats().open_pages == 1
    assert client.update(1, releases=[page]).free_pages == PAGE_COUNT - 1


def test_no_page_fits(store: KvStore) -> None:
    lone = Client(store, "lone", f"{2:032x}", mapped=False)
    assert store.stats().sessions == 0
    assert type(error_of(lambda: attach_with(huge_layers)(lone))) is SetupError
    assert store.stats().total_pages in (0, PAGE_COUNT)


@pytest.mark.parametrize("method", ["Attach", "Match", "Update", "Heartbeat", "Detach", "Stats", "Drain"])
def test_bytes_that_are_no_message(store: KvStore, method: str) -> None:
    call = store.channel.unary_unary(f"/hotset.v1.KvStore/{method}", bytes, bytes)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff" * 100, timeout=60)
    # gRPC answers these itself, before any of ours runs.
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    assert not store.stats().draining


def test_a_large_update_in_time(client: Client) -> None:
    """A million references in one call, none of them the client's, are refused at the first one."""
    releases = [PageRef(2**31, 1)] * 1_000_000
    assert type(error_of(lambda: client.update(releases=releases))) is InvalidRequest


def test_metrics_count_what_happened(client: Client) -> None:
    store = client.store
    before = store.metrics()
    page, sealed = client.update(2).pages
    client.update(seals=[Seal(sealed, bytes(16), None)])
    client.update(PAGE_COUNT)
    error_of(lambda: client.update(releases=[PageRef(2**31, 0)]))
    eventually(lambda: store.metric("hotset_store_pages", state="sealed") == 1)
    after = store.metrics()

    def grown(name: str, **labels: str) -> float:
        key = (name, frozenset(labels.items()))
        return after[key] - before.get(key, 0.0)

    assert grown("hotset_store_pages_allocated_total") == 2
    assert grown("hotset_store_pages_sealed_total") == 1
    assert grown("hotset_store_pages_refused_total") == PAGE_COUNT
    assert grown("hotset_store_rpc_seconds_count", method="Update") == 4
    assert grown("hotset_store_rpc_errors_total", method="Update", status="INVALID_ARGUMENT") == 1
    assert after["hotset_store_pages", frozenset({("state", "open")})] == 1
    assert after["hotset_store_pages", frozenset({("state", "free")})] == PAGE_COUNT - 2
    assert after["hotset_store_sessions", frozenset({("kind", "mapped")})] == 1
    assert all(name.startswith("hotset_store_") for name, _ in after)
    client.update(releases=[page, sealed])
    eventually(lambda: store.metric("hotset_store_pages", state="cached") == 1)
    assert client.match([bytes(16), bytes(17)]) == [sealed]
    assert client.update(PAGE_COUNT, releases=[sealed]).cached_pages == 0
    eventually(lambda: store.metric("hotset_store_pages_evicted_total") == 1)
    after = store.metrics()
    assert grown("hotset_store_pages_looked_up_total") == 2
    assert grown("hotset_store_pages_matched_total") == 1
