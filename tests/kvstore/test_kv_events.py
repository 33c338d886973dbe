"""KV events of a real store to a real subscriber, decoded by vLLM's published schema."""

from __future__ import annotations

import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from services.contract.errors import SetupError
from services.kvstore import event_publisher
from services.kvstore.event_publisher import EventPublisher
from services.kvstore.page_news import MEDIUM, name_of
from services.kvstore.page_refs import PageRef
from services.kvstore.seals import Seal
from services.kvstore.settings import KvStoreSettings
from tests.front.live import until
from tests.kvstore.kv_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber
from tests.kvstore.pair import Pair
from tests.kvstore.process import Client, KvStore, error_of
from tests.kvstore.world import PAGE_COUNT

FLAGS = ("--kv-events=tcp://127.0.0.1:0", "--kv-events-replay=tcp://127.0.0.1:0")
TOKENS = [f"{number:032x}" for number in range(1, 5)]
Start = Callable[..., tuple[KvStore, Subscriber]]


@pytest.fixture
def start(shm: Path, tmp_path: Path) -> Iterator[Start]:
    """A store that publishes, and a subscriber."""
    with ExitStack() as stack:

        def begin(*flags: str, topic: str = "") -> tuple[KvStore, Subscriber]:
            store = stack.enter_context(KvStore(shm / "arena", *FLAGS, *flags, logs=tmp_path)).ready()
            live, replay = re.findall(r"^kv events (\S+)$", store.output, re.MULTILINE)
            return store, stack.enter_context(Subscriber(live, replay, topic))

        yield begin


def hash_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 4


def tokens_of(number: int) -> list[int]:
    return [number * 1000 + place for place in range(64)]


def packed(number: int) -> bytes:
    return struct.pack("<64I", *tokens_of(number))


def seal(client: Client, pages: list[PageRef], numbers: list[int], *, named: bool = True) -> None:
    """Seal a chain; page i is called numbers[i]."""
    parents = [None, *pages]
    client.update(
        seals=[
            Seal(page, hash_of(number), parent, packed(number) if named else b"")
            for page, number, parent in zip(pages, numbers, parents, strict=False)
        ]
    )


def stored(number: int, parent: int | None) -> BlockStored:
    before = None if parent is None else name_of(hash_of(parent))
    name = name_of(hash_of(number))
    return BlockStored([name], before, tokens_of(number), 64, None, MEDIUM, None)


def removed(number: int) -> BlockRemoved:
    return BlockRemoved([name_of(hash_of(number))], MEDIUM)


def test_what_is_stored_and_what_goes(start: Start) -> None:
    store, subscriber = start()
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        assert client.attach().wants_tokens
        pages = list(client.update(5).pages)
        seal(client, pages[:3], [1, 2, 3])
        seal(client, pages[3:4], [4], named=False)  # of an answer: nobody could look for it
        subscriber.until(lambda: len(subscriber.events) == 4, "four events")
        assert subscriber.events == [AllBlocksCleared(), stored(1, None), stored(2, 1), stored(3, 2)]
        assert subscriber.present() == {name_of(hash_of(n)): tokens_of(n) for n in (1, 2, 3)}
        client.update(releases=pages)
        client.update(PAGE_COUNT - 2)  # two of the four cached ones stay
        subscriber.until(lambda: len(subscriber.events) > 4, "an eviction")
        client.update(2)
        subscriber.until(lambda: len(subscriber.events) == 7, "all are gone")
        assert sorted(subscriber.events[4:], key=str) == sorted(map(removed, (1, 2, 3)), key=str)
        assert subscriber.present() == {}
        until(lambda: store.metric("hotset_store_pages_evicted_total") == 4, "the beat")
        told = {
            kind: store.metric("hotset_store_kv_events_total", kind=kind) for kind in ("stored", "removed")
        }
        assert told == {"stored": 3, "removed": 3}
        assert store.metric("hotset_store_pages_sealed_total") == 4


def test_a_late_subscriber_asks_for_what_it_missed_and_then_hears_the_rest(start: Start) -> None:
    store, early = start("--kv-events-topic=kv@a@m", topic="kv@a")
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        client.attach()
        for number in range(1, 5):
            seal(client, list(client.update(1).pages), [number])
            early.until(lambda number=number: len(early.events) == number + 1, "it to be told")  # type: ignore[misc]  # mypy cannot type a default of a lambda
        live, replay = re.findall(r"^kv events (\S+)$", store.output, re.MULTILINE)
        with Subscriber(live, replay) as late:
            assert late.ask(3) == [3, 4]
            assert late.ask(99) == []
            assert late.ask(0) == [0, 1, 2, 3, 4]
            assert late.events == early.events
            number = 5
            while not late.listen():  # until its subscription has arrived
                seal(client, list(client.update(1).pages), [number])
                number += 1
            assert late.ask(5) == list(range(5, number))
            assert len(late.present()) == number - 1
            assert late.topics == {b"kv@a@m"}


def test_two_pages_of_one_hash_are_told_once(start: Start) -> None:
    store, subscriber = start()
    with (
        Client(store, "engine-0", TOKENS[0], mapped=True) as ann,
        Client(store, "engine-1", TOKENS[1], mapped=True) as bob,
    ):
        for client in (ann, bob):
            client.attach()
            pages = list(client.update(2).pages)
            seal(client, pages, [1, 2])
            client.update(releases=pages)
        ann.update(PAGE_COUNT)
        subscriber.until(lambda: len(subscriber.events) == 5, "two stored and removed")
        assert subscriber.events[1:3] == [stored(1, None), stored(2, 1)]
        assert subscriber.present() == {}


def test_another_life_of_the_store_begins_by_clearing(start: Start) -> None:
    store, subscriber = start("--keep-arena")
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        client.attach()
        page = client.update(1).pages[0]
        seal(client, [page], [1])
        subscriber.until(lambda: subscriber.present(), "it to be told")
        store.process.kill()
        store.process.wait()
        again, second = start("--lease-seconds=1")
        client.store = again
        client.attach(held=[page])
        after = client.update(1).pages[0]
        client.update(seals=[Seal(after, hash_of(2), page, packed(2))])
        second.until(lambda: len(second.events) == 2, "the child")
        # Its parent is there and can be found, but the file does not know its tokens; who finds it does.
        assert second.events == [AllBlocksCleared(), stored(2, 1)]
        assert client.match([hash_of(1)], packed(1)) == [page]
        second.until(lambda: len(second.events) == 3, "the parent")
        assert second.events[2] == stored(1, None)


def test_what_an_earlier_life_left_is_told_when_it_is_found(start: Start) -> None:
    store, subscriber = start("--keep-arena")
    with Client(store, "engine-0", TOKENS[0], mapped=True) as client:
        client.attach()
        pages = list(client.update(4).pages)
        seal(client, pages, [1, 2, 3, 4])
        client.update(releases=pages)
        subscriber.until(lambda: len(subscriber.events) == 5, "four pages")
        store.process.kill()
        store.process.wait()
    again, second = start("--lease-seconds=1")
    with Client(again, "engine-0", TOKENS[1], mapped=True) as client:
        client.attach()
        hashes = [hash_of(number) for number in (1, 2, 3, 9)]
        assert client.match(hashes[:2]) == pages[:2], "whoever names nothing finds as much"
        found = client.match(hashes, packed(1) + packed(2))  # the third holds some of an answer, say
        assert found == pages[:3]
        second.until(lambda: len(second.events) == 3, "both that were named")
        assert second.events == [AllBlocksCleared(), stored(1, None), stored(2, 1)]
        client.match(hashes, b"".join(map(packed, (1, 2, 3, 9))))
        second.until(lambda: len(second.events) == 4, "the third; the fourth is not there")
        client.update(releases=found[:2] * 3 + found[2:] * 2)
        until(lambda: client.update(PAGE_COUNT).pages, "nobody else to be waited for")
        second.until(lambda: len(second.events) == 7, "all are gone")
        assert second.events[3] == stored(3, 2)
        assert sorted(second.events[4:], key=str) == sorted(map(removed, (1, 2, 3)), key=str)
        assert error_of(lambda: client.match(hashes, b"cut")).args == ("token ids have 4 bytes each",)


def test_what_comes_from_a_peer_is_told(shm: Path, tmp_path: Path) -> None:
    """To who follows the store that fetched it; the other one tells its own."""
    with ExitStack() as stack:
        pair = Pair(stack, shm, tmp_path, "tcp", *FLAGS)
        live, replay = re.findall(r"^kv events (\S+)$", pair.b.output, re.MULTILINE)
        subscriber = stack.enter_context(Subscriber(live, replay))
        hashes = [hash_of(number) for number in range(1, 5)]
        written = pair.at_a.sequence_of(hashes, 1)
        named = b"".join(packed(number) for number in range(1, 5))
        assert pair.at_b.contents(pair.at_b.match(hashes, named)) == written
        assert pair.b.metric("hotset_store_pages_pulled_total") == 4
        subscriber.until(lambda: len(subscriber.events) >= 5, "what was pulled")
        assert subscriber.events == [
            AllBlocksCleared(),
            *(stored(number, number - 1 if number > 1 else None) for number in range(1, 5)),
        ]
        pair.at_b.match(hashes, named)
        subscriber.ask(0)
        assert len(subscriber.events) == 5, "what is found again is no news"


def test_nobody_wants_tokens_where_nothing_is_told(shm: Path, tmp_path: Path) -> None:
    with (
        KvStore(shm / "arena", logs=tmp_path).ready() as store,
        Client(store, "engine-0", TOKENS[0], mapped=True) as client,
    ):
        assert not client.attach().wants_tokens
        assert store.metric("hotset_store_kv_events_total", kind="stored") == 0


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    made = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "")
    yield made
    made.close()


def test_a_subscriber_that_does_not_read_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It misses batches, sees which, and can ask for them."""
    monkeypatch.setattr(event_publisher, "_HIGH_WATER", 4)
    publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", "")
    large = list(range(70_000, 90_000))  # 100 KB a batch: some 20 MB, far more than sockets hold
    event = msgspec.to_builtins(BlockStored([1], None, large, len(large), None, MEDIUM, None))
    count, longest = 200, 0.0
    try:
        live, replay = publisher.addresses
        with Subscriber(live, replay, high_water=1) as stuck, Subscriber(live, replay) as reader:
            for number in range(count):
                began = time.monotonic()
                publisher.send(event)
                longest = max(longest, time.monotonic() - began)
                if number > 20:  # its subscription has arrived
                    until(lambda number=number: reader.listen() or number in reader.batches, "it to be heard")  # type: ignore[misc]  # mypy cannot type a default of a lambda
                else:
                    until(lambda number=number: number in reader.ask(number), "it to be kept")  # type: ignore[misc]  # as above
            assert longest < 5, "handing over waited for someone"
            assert len(reader.batches) == count
            missed = set(range(count)) - set(stuck.listen())
            assert missed, "everything fitted; nothing was shown"
            again = stuck.ask(min(missed))
            assert again == list(range(min(missed), count))
    finally:
        publisher.close()


@pytest.mark.parametrize("request_", [(b"",), (b"x", bytes(8)), (b"", b"short"), (b"", bytes(8), b"more")])
def test_a_request_that_is_none_is_passed_over(
    publisher: EventPublisher, request_: tuple[bytes, ...]
) -> None:
    live, replay = publisher.addresses
    publisher.send({"type": "AllBlocksCleared"})
    with Subscriber(live, replay) as subscriber:
        socket = subscriber.dealer()
        socket.send_multipart(request_)
        until(lambda: subscriber.ask(0) == [0], "an answer to a good one")
        assert not socket.poll(0)


def test_an_address_that_is_taken(publisher: EventPublisher) -> None:
    taken = publisher.addresses[0]
    with pytest.raises(SetupError, match=f"cannot publish KV events at {taken}: Address already in use"):
        EventPublisher(taken, "", "")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(SetupError, match=r"KV events need zmq: pip install 'hotset\[events\]'"):
        EventPublisher("tcp://127.0.0.1:0", "", "")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--kv-events=127.0.0.1:5557"], "neither tcp://host:port nor ipc:///path"),
        (["--kv-events=tcp://127.0.0.1"], "neither"),
        (["--kv-events=tcp://127.0.0.1:70000"], "neither"),
        (["--kv-events=ipc://relative"], "neither"),
        (["--kv-events=udp://127.0.0.1:1"], "neither"),
        (["--kv-events-replay=tcp://127.0.0.1:5558"], "set that too"),
    ],
)
def test_settings_that_cannot_be(flags: list[str], reason: str) -> None:
    with pytest.raises(SetupError, match=reason):
        KvStoreSettings.from_command_line(flags, program="test")


def test_settings_that_can() -> None:
    assert KvStoreSettings.from_command_line([], program="test").kv_events == ""
    for address in ("tcp://127.0.0.1:0", "tcp://[::1]:5557", "tcp://*:5557", "ipc:///run/events"):
        assert KvStoreSettings.from_command_line([f"--kv-events={address}"], program="test").kv_events
