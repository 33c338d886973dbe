"""Device pages that rows share: whose they are, what they are found by, and when they are loaded."""

from __future__ import annotations

import random

import pytest

from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.resident_pages import ResidentPages
from services.decoder.kv.device_pages import DevicePages

HASHES = [bytes([number]) * 16 for number in range(8)]
PAGES = [HostPage(number, 1) for number in range(8)]


def test_the_first_pages_of_a_chain_are_shared_as_far_as_they_lie_there() -> None:
    pages = ResidentPages(DevicePages(10))
    mine = pages.lay(HASHES[:3], PAGES[:3])
    assert pages.expected(HASHES[:5]) == 3
    theirs = pages.share(HASHES[:5], PAGES[:5])
    assert theirs == mine
    assert pages.free == 7
    pages.check_integrity([*mine, *theirs])
    assert (pages.freed_by(mine), pages.freed_by([*mine, *theirs])) == (0, 3)
    assert pages.give_back(mine) == 0, "another has them"
    assert pages.share(HASHES, PAGES) == mine
    assert pages.give_back(mine) == 0
    assert pages.give_back(theirs) == 3
    assert pages.expected(HASHES) == 0
    assert pages.share(HASHES, PAGES) == []
    pages.check_integrity([])


def test_nobody_shares_unless_they_may() -> None:
    pages = ResidentPages(DevicePages(10), shared=False)
    [place] = pages.lay(HASHES[:1], PAGES[:1])
    assert pages.to_load([place]) == {place}
    assert pages.share(HASHES, PAGES) == []
    assert pages.expected(HASHES) == 0
    pages.check_integrity([place])


def test_a_page_of_other_bytes_is_not_shared() -> None:
    """The same tokens, computed twice: host pages differ, and so may the last bits."""
    pages = ResidentPages(DevicePages(10))
    mine = pages.lay(HASHES[:2], PAGES[:2])
    assert pages.share(HASHES[:2], [PAGES[0], HostPage(1, 2)]) == mine[:1]


def test_who_was_first_is_shared_and_another_changes_nothing() -> None:
    pages = ResidentPages(DevicePages(10))
    first, second = pages.take(1), pages.take(1)
    pages.name(HASHES[0], PAGES[0], first[0])
    pages.name(HASHES[0], PAGES[1], second[0])
    assert pages.share(HASHES[:1], PAGES[:1]) == first
    pages.give_back(second)
    assert pages.share(HASHES[:1], PAGES[:1]) == first
    pages.check_integrity(first * 3)


def test_a_page_is_loaded_once_and_again_where_nobody_can_rely_on_it() -> None:
    pages = ResidentPages(DevicePages(4))
    [place] = pages.lay(HASHES[:1], PAGES[:1])
    assert pages.to_load([place]) == {place}
    assert not pages.to_load([place]), "a step that is planned loads it"
    pages.forget_loads()
    assert pages.to_load([place]) == {place}
    pages.loaded([place])
    pages.forget_loads()
    assert not pages.to_load([place])
    pages.give_back([place])
    assert pages.take(1) == [place]
    assert not pages.to_load([place]), "its new owner writes it"


@pytest.mark.parametrize("seed", range(20))
def test_any_history_keeps_the_books(seed: int) -> None:
    """Chains that share beginnings come and go; a reader finds what its host pages hold, or loads it."""
    chance = random.Random(seed)
    pages, rows, bytes_of = ResidentPages(DevicePages(24)), list[list[int]](), dict[int, HostPage]()
    for _ in range(300):
        if rows and chance.random() < 0.45:
            pages.give_back(rows.pop(chance.randrange(len(rows))))
        else:
            length, common = chance.randint(1, 6), chance.randint(0, 4)
            chain = [(0, at) if at < common else (chance.randint(1, 3), at) for at in range(length)]
            hashes = [repr(chain[: at + 1]).encode() for at in range(length)]
            hosts = [HostPage(hash(tuple(chain[: at + 1])), 1) for at in range(length)]
            shared = pages.share(hashes, hosts)
            if length - len(shared) > pages.free:
                pages.give_back(shared)
            else:
                laid = shared + pages.lay(hashes[len(shared) :], hosts[len(shared) :])
                for host, place in zip(hosts, laid, strict=True):
                    if pages.to_load([place]):
                        bytes_of[place] = host
                    assert bytes_of[place] == host
                rows.append(laid)
                if chance.random() < 0.5:
                    pages.loaded(laid)
        pages.check_integrity(page for row in rows for page in row)
