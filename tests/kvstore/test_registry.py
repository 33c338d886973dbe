"""Stores that find each other by etcd, and what becomes of them when etcd or one of them goes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from services.contract.errors import SetupError, Unavailable
from services.contract.wire_security import NO_SECURITY
from services.kvstore.registry import Registry, reachable
from tests.kvstore.etcd import Etcd
from tests.kvstore.pair import Client, chain, flags
from tests.kvstore.process import KvStore, eventually

LONG = 60.0
Start = Callable[..., KvStore]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path) as made:
        yield made


@pytest.fixture
def start(etcd: Etcd, shm: Path, tmp_path: Path) -> Iterator[Start]:
    """Stores that name etcd and no peer."""
    with ExitStack() as stack:

        def begin(name: str, *more: str) -> KvStore:
            store = KvStore(
                shm / name,
                "--arena-bytes=6MiB",
                *flags("tcp"),
                f"--etcd={etcd.address}",
                *more,
                logs=tmp_path,
            )
            return stack.enter_context(store).ready()

        yield begin


def peers(store: KvStore, count: int) -> None:
    """Wait until the store knows so many others."""
    eventually(lambda: store.metric("hotset_store_peers") == count, LONG)


def registered(store: KvStore, wanted: bool) -> None:
    eventually(lambda: store.metric("hotset_store_registered") == wanted, LONG)


def pulls(source: KvStore, sink: KvStore, name: str) -> None:
    """A prefix sealed in one is found in the other: at once where it is known, later where it was resting."""
    at_source, at_sink = (Client(store, f"{name}-engine", f"{ord(name):032x}") for store in (source, sink))
    written = at_source.sequence_of(chain(name, 4), ord(name))

    def come() -> bool:
        found = at_sink.match(chain(name, 4))
        assert at_sink.contents(found) == written[: len(found)]
        at_sink.update(releases=found)
        return len(found) == 4

    eventually(come, LONG)
    for client in (at_source, at_sink):
        client.detach()


def test_stores_find_each_other_and_miss_those_that_leave(etcd: Etcd, start: Start) -> None:
    etcd.start()
    a, b = start("a", "--lease-seconds=600"), start("b")  # it says goodbye; nobody waits for its lease
    for store in (a, b):
        peers(store, 1)
        registered(store, True)
    pulls(a, b, "x")
    pulls(b, a, "y")
    other = start("c", "--etcd-prefix=/elsewhere/")
    registered(other, True)
    assert [store.metric("hotset_store_peers") for store in (a, b, other)] == [1, 1, 0]
    a.terminate()
    peers(b, 0)
    assert "pull_failed" not in b.log


def test_a_store_serves_before_there_is_an_etcd_and_when_it_is_gone(etcd: Etcd, start: Start) -> None:
    a, b = start("a"), start("b")
    assert Client(a).sequence_of(chain("z", 2), 1)  # nothing waits for etcd
    eventually(lambda: "etcd_unreachable" in a.log, LONG)
    assert a.metric("hotset_store_registered") == 0
    etcd.start()
    peers(b, 1)
    etcd.kill()
    registered(b, False)
    assert b.metric("hotset_store_peers") == 1  # kept
    pulls(a, b, "x")
    etcd.start()  # which knows nobody
    for store in (a, b):
        registered(store, True)
        peers(store, 1)
    assert a.log.count("etcd_unreachable") == 2  # one line an outage


def test_a_store_that_was_killed_is_forgotten_with_its_lease(etcd: Etcd, start: Start) -> None:
    etcd.start()
    a, b = start("a", "--lease-seconds=1"), start("b")
    peers(b, 1)
    a.signal(signal.SIGKILL)
    peers(b, 0)


@pytest.mark.slow
def test_a_store_or_an_etcd_that_stops_for_a_while_is_found_again(etcd: Etcd, start: Start) -> None:
    etcd.start()
    a, b = start("a", "--lease-seconds=1"), start("b", "--lease-seconds=1")
    peers(b, 1)
    a.signal(signal.SIGSTOP)
    peers(b, 0)
    a.signal(signal.SIGCONT)
    peers(b, 1)
    etcd.signal(signal.SIGSTOP)
    for store in (a, b):
        registered(store, False)
    pulls(a, b, "x")
    etcd.signal(signal.SIGCONT)
    for store in (a, b):
        registered(store, True)
        peers(store, 1)


def test_a_notice_that_is_cut_off_is_given_again(etcd: Etcd) -> None:
    """It waits for the turn of a pull, and the lease may fail meanwhile."""
    etcd.start()
    told: list[list[str]] = []

    async def notice(others: Sequence[str]) -> None:
        told.append(list(others))
        if len(told) == 1:
            raise Unavailable("it was cut off")

    async def nothing(others: Sequence[str]) -> None: ...

    async def run() -> None:
        def registry(address: str, heard: Callable[[Sequence[str]], Awaitable[None]]) -> Registry:
            made = Registry([etcd.address], "/hotset/stores/", address, LONG, NO_SECURITY, heard)
            made.start()
            return made

        other, own = registry("10.0.0.1:7700", nothing), registry("10.0.0.2:7700", notice)
        with suppress(TimeoutError):
            async with asyncio.timeout(LONG):
                while len(told) < 2:
                    await asyncio.sleep(0.05)
        for one in (other, own):
            await one.close()

    asyncio.run(run())
    assert told[:2] == [["10.0.0.1:7700"]] * 2


@pytest.mark.parametrize("listening", ["127.0.0.1:7700", "localhost:7700", "[::1]:7700"])
def test_an_address_that_is_everybodys_own_is_warned_of(
    listening: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert reachable(listening) == listening
    assert "--advertise" in caplog.text
    caplog.clear()
    assert reachable("10.0.0.1:7700") == "10.0.0.1:7700"
    assert not caplog.text


@pytest.mark.parametrize("listening", ["0.0.0.0:7700", "[::]:7700", "unix:/run/store.sock"])
def test_an_address_that_others_cannot_use(listening: str) -> None:
    with pytest.raises(SetupError, match="--advertise"):
        reachable(listening)


def test_a_store_that_cannot_be_told_of_does_not_start(shm: Path, tmp_path: Path) -> None:
    more = (*flags("tcp"), "--etcd=127.0.0.1:1", f"--listen=unix:{shm}/store.sock")
    with KvStore(shm / "a", *more, logs=tmp_path) as store:
        assert store.process.wait(LONG) == 2
        assert "--advertise" in store.log
    with KvStore(shm / "b", "--etcd=127.0.0.1:1", logs=tmp_path) as store:
        assert "--data-transport" in store.refused()
