"""Matches, evictions and their order, by a store's calls: what is found, what goes first, what never goes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.contract.errors import InvalidRequest, StaleReference, StateConflict
from services.kvstore.page_refs import PageRef
from services.kvstore.seals import Seal
from tests.kvstore.world import LEASE_SECONDS, OTHER_HEADER, PAGE_COUNT, REMOTE, Client, World


def chain(name: str, length: int) -> list[bytes]:
    """Distinct hashes; those of one name begin alike."""
    return [f"{name}-{at}".encode().ljust(16, b".") for at in range(length)]


def sequence(client: Client, hashes: Sequence[bytes], behind: Sequence[PageRef] = ()) -> list[PageRef]:
    """Pages sealed in order, behind pages that are sealed; all of them."""
    pages = [*behind, *client.allocate(len(hashes))]
    seals = [
        Seal(page, page_hash, pages[at - 1] if at else None)
        for at, (page, page_hash) in enumerate(zip(pages[len(behind) :], hashes, strict=True), len(behind))
    ]
    client.update(seals=seals)
    return pages


def attached(world: World, name: str = "ann") -> Client:
    client = world.client(name)
    client.attach()
    return client


def test_the_longest_sealed_prefix_is_found_and_pinned(world: World) -> None:
    client = attached(world)
    pages = sequence(client, chain("a", 3))
    client.update(releases=pages)
    assert world.count("cached") == 3
    assert client.match(*chain("a", 2), *chain("b", 2)) == tuple(pages[:2])
    assert (world.count("sealed"), world.count("cached")) == (2, 1)
    assert client.match(*chain("b", 2)) == client.match() == ()
    assert client.match(*chain("a", 5)) == tuple(pages)
    client.update(releases=[*pages, *pages[:2]])  # a match is a reference, and so is another
    assert world.count("cached") == 3
    with pytest.raises(StateConflict, match="not held"):
        client.update(releases=pages[:1])


def test_nothing_is_found_behind_a_gap(world: World) -> None:
    client = attached(world)
    sequence(client, chain("a", 3))
    first, _, third = chain("a", 3)
    assert len(client.match(first, b"unknown".ljust(16), third)) == 1


def test_open_pages_are_not_found(world: World) -> None:
    client = attached(world)
    page = client.allocate()[0]
    (page_hash,) = chain("a", 1)
    assert client.match(page_hash) == ()
    client.seal(page, page_hash=page_hash)
    assert client.match(page_hash) == (page,)


def test_hashes_of_other_lengths_are_others(world: World) -> None:
    client = attached(world)
    client.seal(client.allocate()[0], page_hash=bytes(16))
    assert client.match(bytes(17)) == ()
    assert len(client.match(bytes(16))) == 1


def test_a_chain_that_repeats_itself_is_refused_and_pins_nothing(world: World) -> None:
    client = attached(world)
    page = sequence(client, chain("a", 1))[0]
    with pytest.raises(InvalidRequest, match="twice in one chain"):
        client.match(*chain("a", 1) * 2)
    client.update(releases=[page])
    assert world.count("cached") == 1


def test_few_free_and_many_cached_pages_make_room_at_once(world: World) -> None:
    client = attached(world)
    client.update(releases=sequence(client, chain("a", PAGE_COUNT - 1)))
    assert (world.count("free"), world.count("cached")) == (1, PAGE_COUNT - 1)
    answer = client.update(5)
    assert (len(answer.pages), answer.shortfall_pages, answer.free_pages, answer.cached_pages) == (5, 0, 0, 5)
    refused = client.update(6)
    assert (len(refused.pages), refused.shortfall_pages, refused.cached_pages) == (0, 1, 5)
    assert world.store.snapshot().evicted_pages == 4  # a refusal evicts nothing
    assert len(client.allocate(5)) == 5
    assert client.update(1).shortfall_pages == 1


def test_pages_that_are_released_make_room_for_the_same_call(world: World) -> None:
    client = attached(world)
    pages = sequence(client, chain("a", PAGE_COUNT))
    answer = client.update(PAGE_COUNT, releases=pages)
    assert len(answer.pages) == PAGE_COUNT
    assert {ref.page for ref in answer.pages} == {ref.page for ref in pages}
    with pytest.raises(StaleReference):
        client.update(releases=pages[:1])


def test_the_one_unused_for_longest_goes_first(world: World) -> None:
    client = attached(world)
    sequences = {name: sequence(client, chain(name, 2)) for name in "abc"}
    for name in "abc":
        client.update(releases=sequences[name])
    client.update(releases=client.match(*chain("a", 2)))  # used again
    client.allocate(PAGE_COUNT - 6 + 2)
    assert client.match(*chain("b", 2)) == ()
    assert client.match(*chain("c", 2)) == tuple(sequences["c"])
    client.update(2, releases=sequences["c"])
    assert client.match(*chain("a", 2)) == ()
    assert client.match(*chain("c", 2)) == tuple(sequences["c"])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_sequence_loses_its_end_first_however_it_was_released(world: World, reverse: bool) -> None:
    client = attached(world)
    pages = sequence(client, chain("a", 5))
    client.update(releases=pages[::-1] if reverse else pages)
    for left in (4, 3, 2, 1, 0):
        client.allocate(PAGE_COUNT - 5 + 1 if left == 4 else 1)
        found = client.match(*chain("a", 5))
        assert found == tuple(pages[:left])
        client.update(releases=found)


def test_a_prefix_that_is_shared_outlives_every_branch(world: World) -> None:
    client = attached(world)
    prompt = sequence(client, chain("p", 2))
    ends = []
    for name in "xyz":
        behind = client.match(*chain("p", 2))
        ends.append(sequence(client, chain(name, 2), behind))
    client.update(releases=prompt)
    for pages in ends:
        client.update(releases=pages)
    client.allocate(PAGE_COUNT - 8 + 6)
    assert client.match(*chain("p", 2), *chain("z", 2)) == tuple(prompt)


def test_a_child_whose_parent_went_first_is_not_matched_and_goes_in_its_turn(world: World) -> None:
    client = attached(world)
    parent, child = sequence(client, chain("a", 2))
    client.update(releases=[parent])
    filler = client.allocate(PAGE_COUNT - 1)  # evicts the parent
    assert client.match(*chain("a", 2)) == ()
    client.update(releases=[child])
    assert world.count("cached") == 1
    client.update(releases=filler[:1])
    again = client.allocate()[0]
    client.seal(again, page_hash=chain("a", 1)[0])
    assert client.match(*chain("a", 2)) == (again, child)  # whole again
    client.update(releases=[again, child, *filler[1:]])
    assert len(client.update(PAGE_COUNT, releases=[again]).pages) == PAGE_COUNT


def test_matched_pages_are_never_evicted(world: World) -> None:
    ann, bob = attached(world), attached(world, "bob")
    pages = sequence(ann, chain("a", 4))
    ann.update(releases=pages)
    pinned = bob.match(*chain("a", 3))
    assert len(ann.update(PAGE_COUNT).pages) == 0
    answer = ann.update(PAGE_COUNT - 3)
    assert not {ref.page for ref in answer.pages} & {ref.page for ref in pinned}
    assert bob.match(*chain("a", 4)) == pinned
    assert ann.update(1).shortfall_pages == 1


def test_two_clients_share_pages_and_one_dies(world: World) -> None:
    ann, bob = attached(world), attached(world, "bob")
    pages = sequence(ann, chain("a", 3))
    assert bob.match(*chain("a", 3)) == tuple(pages)
    own = sequence(bob, chain("b", 1), pages)[-1]
    ann.allocate(2)
    ann.die()
    world.pass_time(0)
    assert (world.count("sealed"), world.count("open"), world.count("cached")) == (4, 0, 0)
    assert len(bob.allocate(PAGE_COUNT - 4)) == PAGE_COUNT - 4
    assert bob.update(1).shortfall_pages == 1
    bob.update(releases=[*pages, own])
    assert bob.match(*chain("a", 3), *chain("b", 1)) == (*pages, own)


def test_what_a_dead_client_sealed_is_found_by_its_successor(world: World) -> None:
    old = attached(world)
    pages = sequence(old, chain("a", 3))
    old.die()
    new = attached(world)
    assert new.match(*chain("a", 3)) == tuple(pages)


def test_of_two_pages_with_one_hash_the_first_is_found(world: World) -> None:
    ann, bob = attached(world), attached(world, "bob")
    first, second = sequence(ann, chain("a", 2)), sequence(bob, chain("a", 2))
    assert bob.match(*chain("a", 2)) == tuple(first)
    bob.update(releases=[*first, *second])
    assert (world.count("sealed"), world.count("free")) == (2, PAGE_COUNT - 2)  # the second ones are free


def test_the_second_page_is_found_once_the_first_is_gone(world: World) -> None:
    ann, bob = attached(world), attached(world, "bob")
    first, second = sequence(ann, chain("a", 1)), sequence(bob, chain("a", 1))
    ann.update(releases=first)
    ann.allocate(PAGE_COUNT - 1)  # evicts it
    bob.update(releases=second)
    assert bob.match(*chain("a", 1)) == tuple(second)


def test_a_drop_of_the_second_page_is_a_use_of_the_first(world: World) -> None:
    ann, bob = attached(world), attached(world, "bob")
    first, second = sequence(ann, chain("a", 1)), sequence(bob, chain("a", 1))
    other = sequence(ann, chain("b", 1))
    ann.update(releases=first)
    ann.update(releases=other)
    bob.update(releases=second)
    ann.allocate(PAGE_COUNT - 1)  # evicts one page
    assert ann.match(*chain("b", 1)) == ()
    assert ann.match(*chain("a", 1)) == tuple(first)


def test_both_pages_dropped_in_one_call(world: World) -> None:
    client = attached(world)
    first, second = sequence(client, chain("a", 1)), sequence(client, chain("a", 1))
    client.update(releases=[*second, *first])
    assert (world.count("cached"), world.count("free")) == (1, PAGE_COUNT - 1)
    assert client.match(*chain("a", 1)) == tuple(first)


def test_a_restarted_store_finds_what_was_cached_and_the_ends_go_first(world: World) -> None:
    client = attached(world)
    pages = sequence(client, chain("a", 4))
    client.update(releases=pages)
    world.restart()
    client.attach()
    assert client.match(*chain("a", 4)) == tuple(pages)  # before the grace is over
    client.update(releases=pages)
    world.pass_time(LEASE_SECONDS)
    assert world.count("cached") == 4
    client.allocate(PAGE_COUNT - 4)
    for left in (3, 2, 1, 0):
        client.allocate()
        assert world.count("cached") == left
        found = client.match(*chain("a", 4))
        assert found == tuple(pages[:left])
        world.restart()  # what was matched is not claimed again, and the order is made from the file anew
        client.attach(held=[])
        world.pass_time(LEASE_SECONDS)
        client.allocate(PAGE_COUNT - left)


def test_a_restarted_store_evicts_nothing_that_may_be_claimed(world: World) -> None:
    ann, bob = attached(world), attached(world, "bob")
    pages = sequence(bob, chain("a", 4))
    world.restart()
    ann.attach()
    assert len(ann.update(PAGE_COUNT).pages) == 0
    assert set(bob.attach(held=pages).sealed) == set(pages)
    world.pass_time(LEASE_SECONDS)
    assert ann.update(PAGE_COUNT - 3).shortfall_pages == 1


def test_killed_while_it_evicted(world: World) -> None:
    """Between the writes of an eviction: pages whose headers say free already, with their old hashes."""
    client = attached(world)
    pages = sequence(client, chain("a", 4))
    client.update(releases=pages)
    world.headers()["state"][[pages[2].page, pages[3].page]] = 0
    world.headers()["generation"][pages[3].page] += 1
    world.restart()
    client.attach()
    assert client.match(*chain("a", 4)) == tuple(pages[:2])
    world.pass_time(LEASE_SECONDS)
    assert len(client.update(releases=pages[:2]).pages) == 0
    allocated = client.allocate(PAGE_COUNT)
    assert all(ref.generation > 1 for ref in allocated if ref.page in {page.page for page in pages})


def test_killed_while_it_sealed(world: World) -> None:
    """Hash and parent are written and the state is not: the page is open still, and is sealed again."""
    client = attached(world)
    pages = sequence(client, chain("a", 2))
    world.headers()["state"][pages[1].page] = 1
    world.restart()
    assert list(client.attach(held=pages).sealed) == pages[:1]
    assert client.match(*chain("a", 2)) == (pages[0],)
    client.seal(pages[1], pages[0], chain("b", 1)[0])
    assert client.match(chain("a", 1)[0], chain("b", 1)[0]) == tuple(pages)


def test_another_model_finds_nothing(world: World) -> None:
    client = attached(world)
    pages = sequence(client, chain("a", 3))
    client.update(releases=pages)
    client.detach()
    other = world.client("bob", REMOTE)
    other.attach(OTHER_HEADER)
    assert other.match(*chain("a", 3)) == ()
    assert world.count("free") == world.count("total")
    now = world.store.snapshot()
    assert now.counters.allocated - now.freed_pages == now.pages.held + now.pages.cached


def test_matches_are_counted(world: World) -> None:
    client = attached(world)
    sequence(client, chain("a", 2))
    client.match(*chain("a", 5))
    counters = world.store.snapshot().counters
    assert (counters.looked_up, counters.matched) == (5, 2)
