"""The engine's session with a real kvstore: pages taken and given, and what happens when it dies or hangs."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hotset.v1 import kvstore_pb2 as pb

from services.contract.errors import SetupError, Unavailable
from services.contract.planes import Plane, PlaneLayer
from services.decoder.engine import store_client
from services.decoder.engine.host_pages import HostPage, SealOrder
from services.decoder.engine.store_client import StoreClient
from services.decoder.engine.store_session import StoreSession
from tests.engine.processes import Keeper, KvStore, answered, eventually
from tests.waiting import Waiting

ARENA_BYTES = 4 * 2**20
PLANES = (Plane("kv", (PlaneLayer(2, 4, 12288),) * 2),)  # 192 KiB a page: 10 pages
FINGERPRINT = bytes(range(32))
PAGES = 10


@pytest.fixture
def store(shm: Path, keep: Keeper) -> KvStore:
    return keep(KvStore(shm / "arena", ARENA_BYTES))


@contextmanager
def session(address: str, name: str = "engine-0") -> Iterator[StoreSession]:
    made = StoreSession(address, name)
    try:
        yield made
    finally:
        made.close()


def attach(to: StoreSession, fingerprint: bytes = FINGERPRINT, wait: float = 20.0) -> None:
    to.attach(fingerprint, 64, PLANES, wait)


def patiently(mine: StoreSession, give: list[HostPage], want: int) -> list[HostPage]:
    """The same call again until it is answered."""
    pages = answered(lambda: mine.exchange(give, want), 30)
    assert pages is not None
    return pages


def check_books(store: KvStore, mine: StoreSession, held: list[HostPage]) -> None:
    """Store and session count the same pages; what is not held is free for others."""
    assert len(set(held)) == len(held)
    assert mine.held == len(held)
    now = store.stats()
    assert (now.open_pages, now.free_pages) == (len(held), PAGES - len(held))
    assert mine.free == PAGES - len(held)


def test_pages_come_and_go(store: KvStore) -> None:
    with session(store.address) as mine:
        layout = mine.attach(FINGERPRINT, 64, PLANES, 20)
        assert layout.page_count == mine.total == mine.free == PAGES
        assert mine.arena_path == store.arena
        assert [path.suffix for path in (store.directory / "sessions").iterdir()] == [".lock"]
        held = mine.exchange([], 4)
        assert held is not None
        check_books(store, mine, held)
        more = mine.exchange(held[:3], 2)
        assert more is not None
        held = held[3:] + more
        check_books(store, mine, held)
        assert mine.exchange([], PAGES) is None
        check_books(store, mine, held)
        assert mine.exchange(held[:1], PAGES) is None, "too much, and yet the page goes back"
        check_books(store, mine, held[1:])
        assert mine.exchange(held[1:], 0) == []
        check_books(store, mine, [])
        assert mine.exchange([], 0) == []
    assert store.stats().sessions == 0
    assert not list((store.directory / "sessions").iterdir())


def test_closing_gives_everything_back(store: KvStore) -> None:
    with session(store.address) as mine:
        attach(mine)
        mine.exchange([], 7)
        assert store.stats().open_pages == 7
    assert (store.stats().open_pages, store.stats().sessions) == (0, 0)


def test_two_engines_share_an_arena(store: KvStore) -> None:
    with session(store.address) as one, session(store.address, "engine-1") as other:
        attach(one)
        attach(other)
        first, second = one.exchange([], 6), other.exchange([], 4)
        assert first is not None
        assert second is not None
        assert not {page.page for page in first} & {page.page for page in second}
        assert other.exchange([], 1) is None
        assert one.exchange(first, 0) == []
        taken = other.exchange([], 1)
        assert taken is not None


def test_without_a_kvstore_the_error_says_what_to_do() -> None:
    with session("127.0.0.1:9") as mine:
        with (
            Waiting() as waiting,
            pytest.raises(
                SetupError,
                match=r"no kvstore at 127\.0\.0\.1:9 .*`python -m services\.kvstore` first.*--kvstore",
            ),
        ):
            attach(mine, wait=0.3)
        assert waiting.seconds < 5


def test_a_kvstore_that_starts_later_is_waited_for(shm: Path, keep: Keeper) -> None:
    listen = f"unix:{shm}/store.sock"
    with session(listen) as mine:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                attach(mine, wait=60)
            except BaseException as error:  # noqa: BLE001  # told to the test
                errors.append(error)

        waiting = threading.Thread(target=run)
        waiting.start()
        keep(KvStore(shm / "arena", ARENA_BYTES, listen=listen))
        waiting.join(60)
        assert not errors
        assert mine.total == PAGES


def test_a_kvstore_that_hangs_is_not_waited_for_for_ever(store: KvStore) -> None:
    store.send(signal.SIGSTOP)
    with session(store.address) as mine, pytest.raises(SetupError, match="no kvstore at"):
        attach(mine, wait=0.5)
    store.send(signal.SIGCONT)


def test_another_model_is_refused(store: KvStore) -> None:
    with session(store.address) as mine, session(store.address, "engine-1") as other:
        attach(mine)
        mine.exchange([], 1)
        with pytest.raises(SetupError, match="refused"):
            attach(other, fingerprint=bytes(32))
        attach(other)


def test_the_same_engine_twice_is_refused(store: KvStore) -> None:
    with session(store.address) as mine, session(store.address) as twin:
        attach(mine)
        with pytest.raises(SetupError, match=r"engine-0 is attached already.*another name"):
            attach(twin)


@pytest.mark.parametrize("during", ["idle", "giving and taking"])
def test_a_killed_store_comes_back_and_nothing_is_lost_or_given_twice(
    store: KvStore, keep: Keeper, during: str
) -> None:
    with session(store.address) as mine:
        attach(mine)
        held = mine.exchange([], 6)
        assert held is not None
        store.end(signal.SIGKILL)
        give: list[HostPage] = []
        if during != "idle":
            give = held[:2]
            for _ in range(2):
                with pytest.raises(Unavailable):
                    mine.exchange(give, 3)
        again = keep(store.again())
        if during == "idle":  # the heartbeat alone takes the session up
            eventually("the session is taken up again", lambda: again.stats().sessions == 1)
        taken = patiently(mine, give, 3)
        held = [page for page in held if page not in give] + taken
        check_books(again, mine, held)
        assert mine.exchange(held, 0) == []
        check_books(again, mine, [])


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8])
def test_what_is_held_may_be_more_than_a_message_takes(
    store: KvStore, keep: Keeper, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A restarted store is told of seven references to six pages, `most` at a time; two pages are sealed."""
    monkeypatch.setattr(store_client, "_MOST_HELD", most)
    with session(store.address) as mine:
        attach(mine)
        held = mine.exchange([], 6)
        assert held is not None
        hashes = [bytes([number]) * 16 for number in range(3)]
        seals = [SealOrder(held[2], hashes[0], None), SealOrder(held[5], hashes[1], held[2])]
        assert mine.exchange([], 0, seals) == []
        assert mine.match(hashes[:1]) == held[2:3]
        store.end(signal.SIGKILL)
        again = keep(store.again())
        assert patiently(mine, [], 1)
        now = again.stats()
        assert (now.open_pages, now.sealed_pages, now.free_pages) == (5, 2, 3)
        behind = SealOrder(held[0], hashes[2], held[5])
        assert mine.exchange([], 0, [*seals, behind]) == [], "it knows which are sealed"
        assert mine.match(hashes) == [held[2], held[5], held[0]]


def test_a_store_that_hangs_answers_late_and_once(store: KvStore) -> None:
    """The call was sent, its answer never came: repeating it neither loses pages nor gives any back twice."""
    with session(store.address) as mine:
        attach(mine)
        held = mine.exchange([], 6)
        assert held is not None
        store.send(signal.SIGSTOP)
        with pytest.raises(Unavailable):
            mine.exchange(held[:2], 3)
        store.send(signal.SIGCONT)
        # The wish has changed meanwhile: one more page to give, and fewer to take.
        taken = patiently(mine, held[:3], 1)
        assert len(taken) == 1
        left = patiently(mine, [], 2)
        check_books(store, mine, held[3:] + taken + left)


@pytest.mark.parametrize("restarts", [False, True], ids=["it answers late", "it is restarted"])
def test_a_page_that_others_hold_too_is_given_back_once(
    store: KvStore, keep: Keeper, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    """Two hold it, one lets go, and the answer does not come; attaches that fail change nothing of that."""
    with session(store.address) as mine:
        attach(mine)
        pages = mine.exchange([], 1)
        assert pages is not None
        assert mine.exchange([], 0, [SealOrder(pages[0], bytes(16), None)]) == []
        assert mine.match([bytes(16)]) == pages
        store.send(signal.SIGSTOP)
        with pytest.raises(Unavailable):
            mine.exchange(pages, 0)
        with monkeypatch.context() as patch:
            patch.setattr(StoreClient, "attach", nobody_there)
            if restarts:
                store.end(signal.SIGKILL)
                store = keep(store.again())
                for _ in range(3):
                    with pytest.raises(Unavailable):
                        mine.exchange(pages, 1)
            else:
                store.send(signal.SIGCONT)
        taken = patiently(mine, pages, 1)
        assert mine.exchange(taken, 0) == []
        assert (mine.held, store.stats().sealed_pages, store.stats().cached_pages) == (1, 1, 0)
        assert mine.exchange(pages, 0) == [], "the other one"
        assert mine.held == 0
        # A restarted store keeps what is sealed for a while, for whoever may claim it.
        assert store.stats().cached_pages == (0 if restarts else 1)


def nobody_there(client: StoreClient, request: pb.AttachRequest) -> pb.AttachReply:
    raise Unavailable("not now")


def lost(
    call: Callable[[StoreClient, pb.MatchRequest], pb.MatchReply],
) -> Callable[[StoreClient, pb.MatchRequest], pb.MatchReply]:
    """The call is made and answered, and the answer does not arrive."""

    def made(client: StoreClient, request: pb.MatchRequest) -> pb.MatchReply:
        call(client, request)
        raise Unavailable("no answer in time")

    return made


def test_what_a_match_pinned_whose_answer_was_lost_comes_back(
    store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(store.address) as mine:
        attach(mine)
        pages = mine.exchange([], 3)
        assert pages is not None
        hashes = [bytes([number]) * 16 for number in range(2)]
        seals = [SealOrder(pages[0], hashes[0], None), SealOrder(pages[1], hashes[1], pages[0])]
        assert mine.exchange([], 0, seals) == []
        assert mine.exchange(pages[1:2], 0) == []
        with monkeypatch.context() as patch:
            patch.setattr(StoreClient, "match", lost(StoreClient.match))
            with pytest.raises(Unavailable):
                mine.match(hashes)
        assert store.stats().sealed_pages == 2, "the store did what it was asked"
        patiently(mine, [], 0)
        now = store.stats()
        assert (now.sealed_pages, now.cached_pages, now.open_pages) == (1, 1, 1)
        assert mine.lent == 2
        assert mine.match(hashes) == pages[:2]
        assert mine.exchange([pages[0], *pages], 0) == []
        assert (store.stats().sealed_pages, store.stats().open_pages) == (0, 0)


def test_pages_that_nobody_wants_any_more_are_used_next(store: KvStore) -> None:
    """An exchange failed, its sequences were aborted: the pages that came late serve the next ones."""
    with session(store.address) as mine:
        attach(mine)
        store.send(signal.SIGSTOP)
        with pytest.raises(Unavailable):
            mine.exchange([], 9)
        store.send(signal.SIGCONT)
        assert patiently(mine, [], 0) == []
        assert mine.free == PAGES
        taken = patiently(mine, [], 10)
        check_books(store, mine, taken)


@pytest.mark.parametrize("holding", [True, False])
def test_a_store_that_comes_back_empty_ends_the_engine(store: KvStore, keep: Keeper, holding: bool) -> None:
    with session(store.address) as mine:
        attach(mine)
        held = mine.exchange([], 2)
        assert held is not None
        if not holding:
            mine.exchange(held, 0)
        store.end()
        assert not store.arena.exists()
        keep(store.again())
        with pytest.raises(SetupError, match=r"came back (with another arena|without this engine's pages)"):
            patiently(mine, [], 1)


def test_a_draining_store_gives_nothing_but_takes(store: KvStore) -> None:
    with session(store.address) as mine:
        attach(mine)
        held = mine.exchange([], 2)
        assert held is not None
        store.stub.Drain(pb.DrainRequest())
        assert mine.exchange(held[:1], 0) == []
        with pytest.raises(Unavailable, match="gives no pages"):
            mine.exchange([], 1)
        # Nothing was done and nothing is owed: who needs no page goes on.
        assert mine.match([]) == []
        assert mine.exchange(held[1:], 0) == []
        assert (store.stats().open_pages, mine.held) == (0, 0)
        with pytest.raises(Unavailable, match="gives no pages"):
            mine.exchange([], 2)


def test_closing_beside_a_store_that_hangs_is_quick(store: KvStore) -> None:
    with Waiting() as waiting, session(store.address) as mine:
        attach(mine)
        mine.exchange([], 2)
        store.send(signal.SIGSTOP)
    assert waiting.seconds < 6
    store.send(signal.SIGCONT)
    eventually("the store notices the lock", lambda: store.stats().open_pages == 0)


def test_an_arena_directory_that_cannot_be_written_is_explained(store: KvStore) -> None:
    shutil.rmtree(store.directory / "sessions")
    (store.directory / "sessions").write_text("not a directory")
    message = r"cannot write .*sessions.*kvstore's node"
    with session(store.address) as mine, pytest.raises(SetupError, match=message):
        attach(mine)
    (store.directory / "sessions").unlink()
