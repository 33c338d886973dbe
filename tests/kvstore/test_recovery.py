"""The store is killed and started again on its arena, and its clients live, die or come late."""

from __future__ import annotations

import pytest

from services.contract.errors import NotFound, StaleReference, StateConflict
from tests.kvstore.world import LEASE_SECONDS, OTHER_HEADER, PAGE_COUNT, REMOTE, World


def test_a_living_client_goes_on_with_its_pages(world: World) -> None:
    client = world.client()
    before = client.attach()
    kept, sealed, child = client.allocate(3)
    client.seal(sealed)
    client.seal(child, parent=sealed)
    world.restart()
    assert (world.count("open"), world.count("sealed")) == (1, 2)
    with pytest.raises(NotFound, match="attach again"):
        client.heartbeat()
    after = client.attach(held=[kept, sealed, child])
    assert after.session_id == before.session_id
    assert after.epoch > before.epoch
    assert set(after.sealed) == {sealed, child}
    world.pass_time(LEASE_SECONDS)
    client.seal(kept, parent=child)
    answer = client.update(releases=[kept, sealed, child])
    assert (answer.free_pages, answer.cached_pages) == (PAGE_COUNT - 3, 3)


def test_a_living_client_may_take_its_time(world: World) -> None:
    client = world.client()
    client.attach()
    kept, sealed = client.allocate(2)
    client.seal(sealed)
    world.restart()
    world.pass_time(LEASE_SECONDS * 1000)
    assert world.store.snapshot().unclaimed_sessions == 1
    client.attach(held=[kept, sealed])
    assert world.store.snapshot().unclaimed_sessions == 0
    world.pass_time(0)
    assert (world.count("open"), world.count("sealed")) == (1, 1)


def test_what_a_living_client_does_not_claim_comes_back(world: World) -> None:
    client = world.client()
    client.attach()
    kept, _, sealed, _ = client.allocate(4)
    client.seal(sealed)
    world.restart()
    client.attach(held=[kept])
    assert world.count("open") == 1
    assert world.count("sealed") == 1  # another client may still claim it
    world.pass_time(LEASE_SECONDS)
    assert (world.count("open"), world.count("sealed"), world.count("cached")) == (1, 0, 1)


def test_a_client_that_died_with_the_store_gives_its_open_pages_back_at_once(world: World) -> None:
    client = world.client()
    client.attach()
    _, sealed = client.allocate(2)
    client.seal(sealed)
    client.die()
    world.restart()
    assert (world.count("open"), world.count("sealed")) == (0, 1)
    assert not client.lock.path.exists()
    world.pass_time(LEASE_SECONDS)
    assert (world.count("free"), world.count("cached")) == (PAGE_COUNT - 1, 1)


def test_a_client_that_dies_after_the_restart(world: World) -> None:
    client = world.client()
    client.attach()
    client.allocate(2)
    world.restart()
    world.pass_time(LEASE_SECONDS * 2)
    assert world.count("open") == 2
    client.die()
    world.pass_time(0)
    assert world.count("free") == PAGE_COUNT


def test_a_restarted_engine_finds_its_pages_free_at_once(world: World) -> None:
    old = world.client()
    old.attach()
    old.allocate(PAGE_COUNT)
    world.restart()
    old.die()
    new = world.client()
    new.attach()
    assert len(new.allocate(PAGE_COUNT)) == PAGE_COUNT


def test_a_remote_client_has_a_lease_to_come_back(world: World) -> None:
    client = world.client(kind=REMOTE)
    client.attach()
    page, sealed = client.allocate(2)
    client.seal(sealed)
    world.restart()
    world.pass_time(LEASE_SECONDS * 0.9)
    client.attach(held=[page, sealed])
    world.pass_time(LEASE_SECONDS * 0.9)
    assert (world.count("open"), world.count("sealed")) == (1, 1)


def test_a_remote_client_that_comes_late_is_told(world: World) -> None:
    client = world.client(kind=REMOTE)
    client.attach()
    page = client.allocate()[0]
    world.restart()
    world.pass_time(LEASE_SECONDS)
    assert world.count("free") == PAGE_COUNT
    with pytest.raises(StateConflict, match="attach with a new token"):
        client.attach(held=[page])
    other = world.client("engine-1")
    other.attach()
    other.allocate(PAGE_COUNT)
    with pytest.raises(StaleReference):
        client.attach(held=[page])
    client.attach()


def test_sealed_pages_wait_for_every_living_client(world: World) -> None:
    ann, bob = world.client("ann"), world.client("bob")
    ann.attach()
    bob.attach()
    sealed = bob.allocate()[0]
    bob.seal(sealed)
    world.restart()
    ann.attach()
    world.pass_time(LEASE_SECONDS * 5)
    assert world.count("sealed") == 1
    bob.attach(held=[sealed])
    world.pass_time(0)
    assert world.count("sealed") == 1
    bob.detach()
    assert (world.count("free"), world.count("cached")) == (PAGE_COUNT - 1, 1)


def test_a_client_that_locked_but_never_attached_is_waited_for_and_forgotten(world: World) -> None:
    ann = world.client("ann")
    ann.attach()
    ann.allocate()
    idle = world.client("idle")
    world.restart()
    ann.attach()
    assert world.store.snapshot().unclaimed_sessions == 1
    idle.die()
    world.pass_time(LEASE_SECONDS)
    assert world.store.snapshot().unclaimed_sessions == 0


def test_another_model_waits_for_survivors(world: World) -> None:
    client = world.client()
    client.attach()
    client.allocate()
    world.restart()
    with pytest.raises(StateConflict, match="1 have yet to come back and 1 pages are held"):
        world.client("engine-1", REMOTE).attach(OTHER_HEADER)
    client.die()
    world.client("engine-2", REMOTE).attach(OTHER_HEADER)


def test_pages_of_an_arena_that_was_started_anew(world: World) -> None:
    client = world.client()
    client.attach()
    page = client.allocate()[0]
    world.store.close(keep=True)
    (world.directory / "arena.bin").unlink()
    world.store = world._open()
    with pytest.raises(StaleReference, match="attach with a new token and compute them again"):
        client.attach(held=[page])
    client.attach()


def test_epochs_and_generations_grow_through_restarts(world: World) -> None:
    client = world.client()
    epochs, generations = [], []
    for _ in range(4):
        epochs.append(client.attach().epoch)
        generations.append(client.allocate()[0].generation)
        world.restart()
    assert epochs == [1, 2, 3, 4]
    assert generations == [1, 2, 3, 4]


def test_killed_again_before_anyone_came_back(world: World) -> None:
    client = world.client()
    client.attach()
    page, sealed = client.allocate(2)
    client.seal(sealed)
    world.restart()
    world.restart()
    assert list(client.attach(held=[page, sealed]).sealed) == [sealed]


def test_a_call_that_the_kill_swallowed(world: World) -> None:
    """The store did the update and died before it answered: the client names what it knows."""
    client = world.client()
    client.attach()
    held, leaving = client.allocate(2)
    client.update(3, releases=[leaving])  # the answer is lost
    world.restart()
    client.attach(held=[held])
    assert world.count("open") == 1
