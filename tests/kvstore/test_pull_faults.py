"""Pulls that go wrong: nothing there, no room, an end in the middle; nothing wrong stays, nothing leaks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from services.contract.transport.counters import TransportCounters
from services.contract.transport.frame import Credentials
from services.contract.transport.mapped import MappedRequester
from services.contract.transport.protocol import Ticket
from services.kvstore.mapped_source import MappedSource
from services.kvstore.page_fetch import Face, PageFetcher
from services.kvstore.page_refs import PageRefs
from tests.kvstore.pair import HEADER, PAGES, REST_SECONDS, TRANSPORTS, Client, Pair, asked, chain
from tests.kvstore.process import KvStore, eventually, listed
from tests.waiting import Waiting


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_a_client_that_hangs_up_pins_nothing_and_the_pages_come(
    stack: ExitStack, shm: Path, tmp_path: Path
) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp", "--pull-seconds=1.5")
    pair.at_a.sequence_of(chain("y", 1), 2)
    pair.at_b.update(releases=pair.at_b.match(chain("y", 1)))  # they are connected
    written = pair.at_a.sequence_of(chain("x"), 1)
    pair.a.signal(signal.SIGSTOP)  # so that it hangs up while the pull waits
    call = asked(pair.at_b, "x")
    time.sleep(0.1)  # the pull has begun
    call.cancel()
    time.sleep(0.05)  # it hears of that
    pair.a.signal(signal.SIGCONT)
    eventually(pair.rests)
    eventually(lambda: pair.b.metric("hotset_store_pages_pulled_total") == PAGES + 1)
    assert pair.at_b.contents(pair.at_b.match(chain("x"))) == written


def test_a_full_store_pulls_what_it_has_room_for(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp")
    written = pair.at_a.sequence_of(chain("x"), 1)
    total = pair.b.stats().total_pages
    held = pair.at_b.update(total - 3).pages
    found = pair.at_b.match(chain("x"))
    assert len(found) == 3
    assert pair.at_b.contents(found) == written[:3]
    assert pair.at_b.match(chain("x")[3:]) == []  # no room at all
    pair.at_b.update(releases=held)
    time.sleep(REST_SECONDS)
    assert pair.at_b.contents(pair.at_b.match(chain("x"))) == written


@pytest.mark.slow
def test_pins_at_a_peer_go_back_whatever_became_of_the_pull(
    stack: ExitStack, shm: Path, tmp_path: Path
) -> None:
    """A pull that fails has pinned pages there; the peer must not keep them for a reader that lives on."""
    pair = Pair(stack, shm, tmp_path, "ucx", "--ucx-lanes=rdma")  # so that no byte ever comes
    pair.at_a.sequence_of(chain("x", 8), 1)
    pair.at_a.sequence_of(chain("y", 8), 2)
    for name in "xy":
        assert pair.at_b.match(chain(name, 8)) == []
        time.sleep(REST_SECONDS)
    assert pair.b.metric("hotset_store_pulls_failed_total") == 2
    assert pair.a.stats().sealed_pages == 8  # of the last one alone
    assert pair.a.metric("hotset_store_sessions", kind="remote") == 2
    pair.at_b.detach()
    pair.b.terminate()
    pair.at_a.detach()
    assert pair.a.terminate() < 2.5  # it does not wait for a reader


def test_a_long_pull_ends_in_time_with_what_has_come(
    stack: ExitStack, shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    asked: list[int] = []

    class Slow(MappedRequester):
        """A second a look at the clock, which is looked at twice a request."""

        def submit(self, body: bytes, reply_bytes: int, seconds: float) -> Ticket:
            asked.append(reply_bytes)
            return super().submit(body, reply_bytes, seconds)

    store = stack.enter_context(KvStore(shm / "a", "--arena-bytes=6MiB", logs=tmp_path)).ready()
    client = Client(store)
    written = client.sequence_of(chain("x"), 1)
    refs = PageRefs.of(client.match(chain("x")))
    ours = client.update(4).pages
    source = MappedSource(store.arena, HEADER)
    face = Face("a", b"", Credentials(0, 0, b""))
    monkeypatch.setattr("services.kvstore.page_fetch.REQUEST_BYTES", 1)
    monkeypatch.setattr("services.kvstore.page_fetch.time", SimpleNamespace(monotonic=lambda: next(clock)))
    fetcher = PageFetcher(lambda face, seconds: Slow(source, 0, TransportCounters()))
    four = PageRefs(refs.pages[:4], refs.generations[:4])
    into = np.array([page.page for page in ours])
    fetched = fetcher.fetch(face, four, client.bytes, into, 8.0, 14.0)
    assert fetched.error is None
    assert 0 < fetched.pages == len(asked) < 4
    assert client.contents(ours)[: fetched.pages] == written[: fetched.pages]
    fetcher.close()


FAST = (("ucx-shm", signal.SIGSTOP, "during"),)
FAULTS = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in product(TRANSPORTS, (signal.SIGKILL, signal.SIGSTOP), ("before", "during", "between"))
]


@pytest.mark.parametrize(("transport", "number", "moment"), FAULTS)
def test_a_peer_that_fails_costs_a_pull_and_no_more(
    stack: ExitStack, shm: Path, tmp_path: Path, transport: str, number: signal.Signals, moment: str
) -> None:
    pair = Pair(stack, shm, tmp_path, transport, "--pull-seconds=1.0")
    written = pair.at_a.sequence_of(chain("x"), 1)
    other = pair.at_a.sequence_of(chain("y", 3), 2)
    if moment == "between":
        first = pair.at_b.match(chain("y", 3))
        assert pair.at_b.contents(first) == other
        pair.at_b.update(releases=first)
    if moment == "during":  # as near as one gets from outside: the pages are asked for now
        ask = asked(pair.at_b, "x")
        time.sleep(0.004)
        pair.a.signal(number)
        found = listed(ask.result().pages)
    else:
        pair.a.signal(number)
        with Waiting(pair.b.process.pid) as waiting:
            found = pair.at_b.match(chain("x"))
        assert waiting.seconds < 2.5
    assert pair.at_b.contents(found) == written[: len(found)]
    pair.at_b.update(releases=found)
    eventually(lambda: pair.b.stats().open_pages == pair.b.stats().sealed_pages == 0)
    if number == signal.SIGSTOP:
        pair.a.signal(signal.SIGCONT)
    else:
        pair.a.process.wait()
        pair.a = pair.start("a", f"--listen={pair.a.grpc}")  # another life of the same arena
    time.sleep(REST_SECONDS)
    again = pair.at_b.match(chain("x"))
    assert pair.at_b.contents(again) == written
    pair.at_b.update(releases=again)


def test_a_killed_puller_leaves_no_page_behind(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp", "--pull-seconds=1.5")
    pair.at_a.sequence_of(chain("x"), 1)
    asked(pair.at_b, "x")
    time.sleep(0.004)  # as above
    pair.b.signal(signal.SIGKILL)
    pair.b.process.wait()
    b = pair.start("b", "--lease-seconds=0.5")
    eventually(lambda: b.stats().open_pages == b.stats().sealed_pages == 0)


def test_an_arena_that_was_removed_is_no_source(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair(stack, shm, tmp_path, "mapped")
    pair.at_a.sequence_of(chain("x", 4), 1)
    assert len(pair.at_b.match(chain("x", 4))) == 4
    pair.at_a.sequence_of(chain("y", 4), 2)
    pair.a.arena.unlink()
    assert pair.at_b.match(chain("y", 4)) == []


def test_a_peer_needs_a_transport(shm: Path, tmp_path: Path) -> None:
    with KvStore(shm / "a", "--peers=127.0.0.1:1", logs=tmp_path) as store:
        assert "--data-transport" in store.refused()


def test_lanes_that_are_not_there_are_an_error_not_a_surprise(
    stack: ExitStack, shm: Path, tmp_path: Path
) -> None:
    pair = Pair(stack, shm, tmp_path, "ucx", "--ucx-tls=tcp,self", "--ucx-lanes=rdma")
    pair.at_a.sequence_of(chain("x", 4), 1)
    assert pair.at_b.match(chain("x", 4)) == []
    assert "UCX was to use rdma lanes and uses tcp/lo" in pair.b.log
