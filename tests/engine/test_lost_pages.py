"""What a remote engine held in an arena that is gone: it is given back like anything, and must not count.

A new arena counts lives of pages from 1 again, so a dead reference looks like one that somebody holds now.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.decoder.engine.held_pages import HeldPages
from services.decoder.engine.host_pages import HostPage, PagesLost
from services.decoder.engine.page_desk import PageDesk
from services.decoder.engine.remote_session import RemoteSession
from tests.engine.processes import Keeper, KvStore, answered
from tests.engine.remote_rig import TRANSPORTS
from tests.engine.test_store_session import ARENA_BYTES, FINGERPRINT, PLANES


@pytest.fixture
def mine() -> Iterator[list[RemoteSession]]:
    """Sessions that are closed while their store still answers."""
    made: list[RemoteSession] = []
    yield made
    for session in made:
        session.close()


@pytest.mark.parametrize("most", [None, 2])
def test_dead_pages_take_no_living_one_along(
    shm: Path, keep: Keeper, mine: list[RemoteSession], most: int | None
) -> None:
    flags = TRANSPORTS["tcp"]
    store = keep(KvStore(shm / "store", ARENA_BYTES, listen="127.0.0.1:0", flags=flags))
    session = RemoteSession(store.address, "engine-0")
    mine.append(session)
    session.attach(FINGERPRINT, 64, PLANES, 60.0)
    desk = PageDesk(session, None, 64)
    old = desk.exchange(6)
    assert old is not None
    address = store.address
    store.clear_away()
    shutil.rmtree(shm / "store")
    store = keep(KvStore(shm / "store", ARENA_BYTES, listen=address, flags=flags))
    with pytest.raises(PagesLost):
        answered(lambda: desk.exchange(1))
    desk.give(old)  # their sequences end
    fresh = answered(lambda: desk.exchange(3, most))
    assert fresh is not None
    assert set(fresh) & set(old), "or nothing could be mistaken"
    while desk.has_work:
        answered(lambda: desk.exchange(0, most))
    assert session.held == store.stats().open_pages == 3
    desk.check_integrity(fresh)
    desk.give(fresh)
    answered(lambda: desk.exchange(0))
    assert session.held == store.stats().open_pages == 0


def test_after_a_loss_all_that_was_lent_will_be_given_and_none_of_it_counts() -> None:
    page, other, kept = HostPage(1, 1), HostPage(2, 1), HostPage(3, 1)
    held = HeldPages()
    held.take([page, page, other, kept])
    held.let_go([other], late=True)
    held = held.after_loss([kept])  # nobody was lent that one, so nobody gives it
    held.take([page, kept])
    assert held.count == 2
    assert held.still_here([page, other, kept]) == [kept]
    held.told([page, other, kept])
    assert held.still_here([page]) == [], "there were two"
    held.told([page])
    assert held.still_here([page]) == [page]
