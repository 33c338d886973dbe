from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.contract.errors import (
    HotsetError,
    InvalidRequest,
    NotFound,
    SetupError,
    StaleReference,
    StateConflict,
)
from services.contract.file_header import FileHeader
from services.contract.planes import Plane, PlaneLayer
from services.kvstore.orders import AttachOrder, UpdateOrder
from services.kvstore.page_refs import PageRef, PageRefs
from services.kvstore.seals import NO_SEALS, Seal
from services.kvstore.sessions import SessionEnd, session_id_of
from tests.kvstore.world import (
    ARENA_BYTES,
    HEADER,
    LEASE_SECONDS,
    MAPPED,
    OTHER_HEADER,
    PAGE_COUNT,
    REMOTE,
    World,
)

TOKEN = f"{7:032x}"
NONE = PageRefs.of(())


def ended(world: World, reason: SessionEnd) -> int:
    return world.store.snapshot().counters.ended[reason]


# --- attach ---


def test_the_first_attach_lays_the_arena_out(world: World) -> None:
    assert world.count("total") == 0
    client = world.client()
    attached = client.attach()
    assert attached.arena_path == str(world.directory / "arena.bin")
    assert (attached.arena_bytes, attached.page_count) == (ARENA_BYTES, PAGE_COUNT)
    assert (attached.epoch, attached.lease_ms, len(attached.sealed)) == (1, 10_000, 0)
    assert attached.session_id == session_id_of(client.token) != 0
    assert world.count("free") == PAGE_COUNT


GOOD = AttachOrder("engine-0", REMOTE, TOKEN, HEADER, NONE)
REFUSED = {
    "no name": replace(GOOD, client_name=""),
    "a name with spaces": replace(GOOD, client_name="a b"),
    "a name of two lines": replace(GOOD, client_name="a\nb"),
    "a long name": replace(GOOD, client_name="a" * 129),
    "no token": replace(GOOD, token=""),
    "a short token": replace(GOOD, token=TOKEN[1:]),
    "a path for a token": replace(GOOD, token="../../../../../../../etc/passwd0"),
    "capitals": replace(GOOD, token="A" * 32),
    "a token of two lines": replace(GOOD, token=TOKEN + "\n"),
    "a short fingerprint": replace(GOOD, header=replace(HEADER, fingerprint=bytes(31))),
    "no fingerprint": replace(GOOD, header=replace(HEADER, fingerprint=b"")),
    "pages of 63 tokens": replace(GOOD, header=replace(HEADER, page_tokens=63)),
    "pages of no tokens": replace(GOOD, header=replace(HEADER, page_tokens=0)),
    "endless pages": replace(GOOD, header=replace(HEADER, page_tokens=2**32 - 1)),
}


@pytest.mark.parametrize("order", REFUSED.values(), ids=REFUSED)
def test_orders_that_no_store_could_serve(world: World, order: AttachOrder) -> None:
    with pytest.raises(InvalidRequest):
        world.store.attach(order)
    assert world.count("total") == 0


def test_a_page_larger_than_the_arena(world: World) -> None:
    header = FileHeader(64, bytes(32), (Plane("kv", (PlaneLayer(1, 1, ARENA_BYTES),)),))
    with pytest.raises(SetupError, match="larger --arena-bytes"):
        world.client().attach(header)
    world.client("engine-1").attach()


def test_a_mapped_client_without_its_lock(world: World) -> None:
    client = world.client()
    client.die()
    with pytest.raises(StateConflict, match=f"sessions/{client.token}.lock beside the arena; lock it"):
        client.attach()


def test_others_share_the_layout(world: World) -> None:
    world.client().attach()
    other = world.client("engine-1").attach()
    assert (other.page_count, other.epoch) == (PAGE_COUNT, 2)


@pytest.mark.parametrize(
    "header", [OTHER_HEADER, replace(HEADER, fingerprint=bytes(31) + b"x")], ids=["planes", "model"]
)
def test_another_geometry_waits_until_nobody_needs_the_old_one(world: World, header: FileHeader) -> None:
    first = world.client()
    first.attach()
    old = first.allocate()[0]
    with pytest.raises(StateConflict, match=r"1 clients are attached, .* and 1 pages are held"):
        world.client("engine-1").attach(header)
    first.detach()
    second = world.client("engine-2")
    second.attach(header)
    page = second.allocate()[0]
    assert (page.page, old.generation < page.generation) == (old.page, True)
    with pytest.raises(StaleReference):
        second.update(releases=[old])


def test_an_attach_again_is_the_same_session_in_a_new_epoch(world: World) -> None:
    client = world.client()
    first = client.attach()
    kept, lost, sealed = client.allocate(3)
    client.seal(sealed)
    again = client.attach(held=[kept, sealed])
    assert (again.session_id, again.epoch, *again.sealed) == (first.session_id, 2, sealed)
    assert (world.count("open"), world.count("sealed")) == (1, 1)
    with pytest.raises(StaleReference, match="at epoch 2, the call is of 1"):
        world.store.heartbeat(first.session_id, first.epoch)
    with pytest.raises(StateConflict):
        client.update(releases=[lost])
    assert client.update(releases=[kept, sealed]).free_pages == PAGE_COUNT - 1
    assert world.count("cached") == 1


def test_claims_of_a_new_token_are_refused(world: World) -> None:
    first = world.client()
    first.attach()
    page = first.allocate()[0]
    with pytest.raises(StateConflict, match="attach with a new token"):
        world.client("engine-1").attach(held=[page])
    assert len(world.store.snapshot().sessions) == 2
    assert world.store.snapshot().sessions[MAPPED] == 1


def test_a_token_of_another_client(world: World) -> None:
    world.client(token=TOKEN).attach()
    with pytest.raises(StateConflict, match="mapped client engine-0; every client chooses its own"):
        world.client("engine-1", REMOTE, TOKEN).attach()


# --- ends ---


def test_detach_gives_everything_back(world: World) -> None:
    client = world.client()
    client.attach()
    sealed, *_ = client.allocate(4)
    client.seal(sealed)
    assert client.detach() == 4
    assert (world.count("free"), world.count("cached")) == (PAGE_COUNT - 1, 1)
    with pytest.raises(NotFound, match="attach again"):
        client.update(1)
    with pytest.raises(NotFound):
        client.detach()


def test_a_mapped_clients_pages_come_back_when_its_process_is_gone_and_not_before(world: World) -> None:
    client = world.client()
    client.attach()
    client.allocate(3)
    world.pass_time(LEASE_SECONDS * 100)
    snapshot = world.store.snapshot()
    assert (snapshot.pages.open, snapshot.expired_sessions, snapshot.counters.mapped_leases) == (3, 1, 1)
    world.pass_time(LEASE_SECONDS * 100)
    assert world.store.snapshot().counters.mapped_leases == 1  # once a silence
    client.heartbeat()
    assert world.store.snapshot().expired_sessions == 0
    assert client.allocate()
    client.die()
    world.pass_time(0)
    assert world.count("free") == PAGE_COUNT
    assert ended(world, SessionEnd.GONE) == 1
    assert not client.lock.path.exists()


def test_a_remote_clients_pages_come_back_when_its_lease_ends(world: World) -> None:
    client = world.client(kind=REMOTE)
    client.attach()
    client.allocate(3)
    for _ in range(5):
        world.pass_time(LEASE_SECONDS * 0.9)
        assert client.heartbeat() == 10_000
    world.pass_time(LEASE_SECONDS * 0.99)
    assert world.count("open") == 3
    world.pass_time(LEASE_SECONDS * 0.02)
    assert (world.count("open"), ended(world, SessionEnd.LEASE)) == (0, 1)
    with pytest.raises(NotFound, match="attach again"):
        client.heartbeat()


def test_a_lease_that_ended_is_over_before_the_store_looks(world: World) -> None:
    client = world.client(kind=REMOTE)
    client.attach()
    world.clock.now += LEASE_SECONDS
    with pytest.raises(NotFound):
        client.allocate()
    assert ended(world, SessionEnd.LEASE) == 1


def test_any_call_renews_the_lease(world: World) -> None:
    client = world.client(kind=REMOTE)
    client.attach()
    for _ in range(3):
        world.pass_time(LEASE_SECONDS * 0.9)
        client.update()


# --- the same client again ---


def test_a_restarted_mapped_client_is_let_in_at_once(world: World) -> None:
    old = world.client()
    old.attach()
    old.allocate(PAGE_COUNT)
    old.die()
    new = world.client()
    assert new.attach().epoch == 2
    assert len(new.allocate(PAGE_COUNT)) == PAGE_COUNT
    with pytest.raises(NotFound):
        old.heartbeat()


def test_a_second_client_of_the_same_name_is_refused_while_the_first_lives(world: World) -> None:
    old = world.client()
    old.attach()
    new = world.client()
    world.pass_time(LEASE_SECONDS * 2)
    with pytest.raises(StateConflict, match="engine-0 is attached already and its process lives; stop"):
        new.attach()
    assert old.heartbeat()


def test_a_restarted_remote_client_replaces_itself(world: World) -> None:
    old = world.client(kind=REMOTE)
    old.attach()
    old.allocate(PAGE_COUNT)
    new = world.client(kind=REMOTE)
    new.attach()
    assert ended(world, SessionEnd.REPLACED) == 1
    assert len(new.allocate(PAGE_COUNT)) == PAGE_COUNT
    with pytest.raises(NotFound):
        old.allocate()


def test_an_attach_that_is_refused_replaces_nobody(world: World) -> None:
    world.client("engine-1").attach()
    old = world.client(kind=REMOTE)
    old.attach()
    (page,) = old.allocate()
    new = world.client(kind=REMOTE)
    with pytest.raises(StateConflict, match="1 clients are attached"):
        new.attach(OTHER_HEADER)
    with pytest.raises(StateConflict, match="claimed"):
        new.attach(held=[page])
    assert ended(world, SessionEnd.REPLACED) == 0
    old.update(releases=[page])


def test_a_restarted_remote_client_may_bring_another_model(world: World) -> None:
    old = world.client(kind=REMOTE)
    old.attach()
    old.allocate(PAGE_COUNT)
    world.client(kind=REMOTE).attach(OTHER_HEADER)
    assert (ended(world, SessionEnd.REPLACED), world.count("free")) == (1, world.count("total"))
    assert world.store.snapshot().freed_pages == PAGE_COUNT
    with pytest.raises(NotFound):
        old.heartbeat()


# --- other stores, which read only ---


def test_a_reader_does_not_keep_the_arena_from_another_model(world: World) -> None:
    """It comes again at every miss of its own, so nobody could wait for it to leave."""
    engine = world.client(kind=REMOTE)
    engine.attach()
    page = engine.seal(engine.allocate()[0])
    reader = world.client("store-1", REMOTE)
    reader.attach(reads_only=True)
    (pinned,) = reader.match(bytes([page.page]) * 16)
    engine.detach()
    other = world.client(kind=REMOTE)
    with pytest.raises(StaleReference):
        other.attach(OTHER_HEADER, held=[page])
    assert reader.heartbeat()  # what is refused does it no harm
    other.attach(OTHER_HEADER)
    assert world.count("free") == world.count("total")
    assert ended(world, SessionEnd.REPLACED) == 1
    with pytest.raises(NotFound):
        reader.update(releases=[pinned])
    with pytest.raises(StateConflict, match="not laid out"):
        reader.attach(reads_only=True)
    reader.attach(OTHER_HEADER, reads_only=True)


def test_a_reader_that_falls_silent_is_no_decoder_that_hangs(world: World) -> None:
    """Nor does what it looks for count as what prompts asked for here."""
    engine = world.client()
    engine.attach()
    reader = world.client("store-1", REMOTE)
    reader.attach(reads_only=True)
    reader.match(bytes(16))
    engine.match(bytes(16), bytes(17))
    world.clock.now += LEASE_SECONDS
    with pytest.raises(NotFound):
        reader.match(bytes(16))
    reader.attach(reads_only=True)
    world.clock.now += LEASE_SECONDS * 0.5
    engine.heartbeat()
    world.pass_time(LEASE_SECONDS * 0.5)
    assert (ended(world, SessionEnd.IDLE), ended(world, SessionEnd.LEASE)) == (2, 0)
    counters = world.store.snapshot().counters
    assert (counters.looked_up, counters.matched) == (2, 0)


# --- update ---


def test_no_room_is_an_answer(world: World) -> None:
    client = world.client()
    client.attach()
    client.allocate(PAGE_COUNT - 1)
    refused = client.update(4)
    assert (len(refused.pages), refused.shortfall_pages, refused.free_pages) == (0, 3, 1)
    assert world.store.snapshot().counters.refused == 4
    huge = client.update(2**32 - 1)
    assert huge.shortfall_pages == 2**32 - 2
    assert len(client.allocate(1)) == 1


def test_a_repeated_number_gets_the_first_answer(world: World) -> None:
    client = world.client()
    client.attach()
    first = client.update(2, sequence=1)
    assert client.update(2, sequence=1) is first
    assert client.update(9, sequence=1, releases=[PageRef(99, 9)]) is first
    assert world.count("open") == 2
    released = client.update(releases=list(first.pages)[:1], sequence=2)
    assert client.update(releases=list(first.pages)[:1], sequence=2) is released
    assert world.count("open") == 1


@pytest.mark.parametrize("sequence", [0, 1, 4, 2**64 - 1])
def test_other_numbers_are_refused(world: World, sequence: int) -> None:
    client = world.client()
    client.attach()
    client.allocate()
    client.allocate()
    with pytest.raises(StateConflict, match=f"update {sequence} does not follow 2"):
        client.update(1, sequence=sequence)
    assert world.count("open") == 2


def test_number_0_is_refused_at_first(world: World) -> None:
    client = world.client()
    client.attach()
    with pytest.raises(StateConflict, match="update 0 does not follow 0"):
        client.update(1, sequence=0)


def test_a_refused_call_does_not_use_its_number_up(world: World) -> None:
    client = world.client()
    client.attach()
    page = client.allocate()[0]
    with pytest.raises(StaleReference):
        client.update(1, sequence=2, releases=[page, PageRef(page.page, 9)])
    assert client.update(1, sequence=2, releases=[page]).free_pages == PAGE_COUNT - 1


def test_numbers_start_anew_with_an_epoch(world: World) -> None:
    client = world.client()
    client.attach()
    (page,) = client.update(1, sequence=1).pages
    client.attach(held=[page])
    assert list(client.update(1, sequence=1).pages) != [page]


def test_calls_of_strangers(world: World) -> None:
    client = world.client()
    attached = client.attach()
    order = UpdateOrder(1, NONE, NO_SEALS, 1)
    for session_id, epoch, kind in (
        (0, 1, NotFound),
        (attached.session_id ^ 1, 1, NotFound),
        (attached.session_id, 0, StaleReference),
        (attached.session_id, 2, StaleReference),
    ):
        for call in (
            lambda s=session_id, e=epoch: world.store.update(s, e, order),
            lambda s=session_id, e=epoch: world.store.heartbeat(s, e),
            lambda s=session_id, e=epoch: world.store.match(s, e, [], b""),
            lambda s=session_id, e=epoch: world.store.detach(s, e),
        ):
            with pytest.raises(kind):
                call()
    assert world.count("open") == 0


def test_pages_of_another_session(world: World) -> None:
    ann, bob = world.client("ann"), world.client("bob")
    ann.attach()
    bob.attach()
    page = ann.allocate()[0]
    with pytest.raises(StateConflict, match="not held by this session"):
        bob.update(releases=[page])
    with pytest.raises(StateConflict, match="not held by this session"):
        bob.update(seals=[Seal(page, bytes(16), None)])
    bob.detach()
    assert world.count("open") == 1


# --- drain ---


def test_draining_takes_nothing_new_and_lets_what_runs_finish(world: World) -> None:
    client = world.client()
    client.attach()
    page, other = client.allocate(2)
    assert world.store.drain() == 1
    with pytest.raises(StateConflict, match="draining and allocates no pages"):
        client.update(1, releases=[page])
    with pytest.raises(StateConflict, match="draining and takes no new session"):
        world.client("engine-1").attach()
    assert client.heartbeat()
    client.seal(other)
    assert client.update(releases=[page]).free_pages == PAGE_COUNT - 1
    client.detach()
    assert world.store.drain() == 0
    assert world.store.snapshot().draining


# --- figures ---


def test_what_was_allocated_is_freed_or_held(world: World) -> None:
    client = world.client()
    client.attach()
    pages = client.allocate(6)
    client.seal(pages[0])
    client.update(releases=pages[:2])
    other = world.client("engine-1", REMOTE)
    other.attach()
    other.allocate(3)
    world.pass_time(LEASE_SECONDS * 2)
    now = world.store.snapshot()
    assert now.counters.allocated - now.freed_pages == now.pages.held + now.pages.cached == 5
    assert (now.counters.attaches, now.counters.sealed, now.freed_pages) == (2, 1, 4)
    assert (now.sessions[MAPPED], now.sessions[REMOTE]) == (1, 0)
    assert (now.page_bytes, now.page_tokens) == (2 * 2 * 4 * 12288, 64)


def test_sizes_are_a_table_for_people(world: World) -> None:
    assert "laid out by the first client's planes" in world.store.sizes().table()
    world.client().attach()
    table = world.store.sizes().table()
    assert "10 of 192 KiB and 64 tokens, 640 tokens in all" in table
    assert "arena.bin, 4 MiB" in table


def test_a_store_that_does_not_open_leaves_what_it_found(shm: Path) -> None:
    made = World(shm / "arena")
    client = made.client()
    client.attach()
    client.allocate()
    client.die()
    made.store.close(keep=True)
    path = shm / "arena" / "arena.bin"
    contents = bytearray(path.read_bytes())
    contents[65536] = 9  # the state of page 0
    path.write_bytes(contents)
    with pytest.raises(HotsetError, match="header of page 0 is damaged"):
        World(shm / "arena")
    assert path.read_bytes() == contents
