"""A prefix sealed in one store is found in another: pulled over any transport, whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.contract.errors import StateConflict
from services.contract.transport.frame import Credentials
from services.contract.transport.protocol import Requester
from services.kvstore.page_refs import PageRefs
from services.kvstore.page_request import write_request
from tests.contract.transport.peer import connect
from tests.kvstore import process
from tests.kvstore.pair import LANES, PAGES, REST_SECONDS, TRANSPORTS, Client, Pair, asked, chain
from tests.kvstore.process import eventually, listed


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_a_prefix_is_pulled_byte_for_byte(
    stack: ExitStack, shm: Path, tmp_path: Path, transport: str
) -> None:
    pair = Pair(stack, shm, tmp_path, transport)
    written = pair.at_a.sequence_of(chain("x"), 1)
    found = pair.at_b.match([*chain("x"), *chain("more", 3)])
    assert len(found) == PAGES
    assert pair.at_b.contents(found) == written
    pair.at_b.update(releases=found)
    again = pair.at_b.match(chain("x"))  # it is here now
    assert pair.at_b.contents(again) == written
    pair.at_b.update(releases=again)
    eventually(pair.rests)
    assert pair.b.metric("hotset_store_pages_pulled_total") == PAGES
    assert pair.b.metric("hotset_store_pulls_failed_total") == 0
    if transport != "mapped":
        assert pair.a.metric("hotset_store_pages_served_total") == PAGES
        lanes = [
            dict(labels)["lane"] for name, labels in pair.b.metrics() if name == "hotset_store_data_lanes"
        ]
        assert lanes
        assert all(lane.startswith(LANES[transport]) for lane in lanes)
        assert pair.a.metric("hotset_store_data_bytes_total", role="served", direction="sent") > 10**6
    for client in (pair.at_b, pair.at_a):
        client.detach()
        assert client.store.terminate() < 3


def test_what_is_here_is_not_pulled_and_what_follows_is_sealed_behind_it(
    stack: ExitStack, shm: Path, tmp_path: Path
) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp")
    written = pair.at_a.sequence_of(chain("x"), 1)
    pair.at_b.sequence_of(chain("x", 5), 1)
    found = pair.at_b.match(chain("x"))
    assert pair.at_b.contents(found) == written
    assert pair.b.metric("hotset_store_pages_pulled_total") == PAGES - 5


def test_nobody_is_asked_twice_at_once_for_what_nobody_has(
    stack: ExitStack, shm: Path, tmp_path: Path
) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp")
    for _ in range(5):
        assert pair.at_b.match(chain("nothing")) == []
    assert pair.b.metric("hotset_store_pulls_empty_total") == 1
    time.sleep(REST_SECONDS)
    pair.at_a.sequence_of(chain("nothing"), 3)
    assert len(pair.at_b.match(chain("nothing"))) == PAGES


def test_two_who_ask_at_once_wait_for_one_pull(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair(stack, shm, tmp_path, "tcp")
    written = pair.at_a.sequence_of(chain("x"), 1)
    other = Client(pair.b, "other", "0" * 31 + "2")
    both = [asked(client, "x") for client in (pair.at_b, other)]
    answers = [call.result() for call in both]
    assert all(pair.at_b.contents(listed(answer.pages)) == written for answer in answers)
    assert pair.b.metric("hotset_store_pages_pulled_total") == PAGES


def test_another_model_is_never_pulled_nor_laid_out(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    pair = Pair.__new__(Pair)
    pair.stack, pair.shm, pair.logs, pair.transport = stack, shm, tmp_path, "tcp"
    a = pair.start("a")
    b = pair.start("b", f"--peers={a.grpc}")
    assert Client(b).match(chain("x")) == []
    assert a.stats().total_pages == 0  # a reader lays nothing out
    other = process.Client(a, "other", "0" * 31 + "2", mapped=False)
    other.attach()
    time.sleep(REST_SECONDS)
    assert Client(b, "again", "0" * 31 + "3").match(chain("x")) == []
    assert a.stats().sessions == 1


def test_a_reader_reads_only_what_it_holds(
    stack: ExitStack, shm: Path, tmp_path: Path, transport: str
) -> None:
    if transport == "mapped":
        pytest.skip("who may map an arena may read it")
    pair = Pair(stack, shm, tmp_path, transport)
    pair.at_a.sequence_of(chain("x"), 1)
    [page, *_] = pair.at_a.match(chain("x"))  # held by this session
    stranger = Client(pair.a, "stranger", "0" * 31 + "9")
    [face] = stranger.session.data_faces
    said = Credentials(stranger.session.session_id, stranger.session.epoch, stranger.session.data_key)
    requester: Requester = connect(transport, face.address, credentials=said)

    def ask(number: int, generation: int) -> bytes:
        body = write_request(PageRefs.of_numbers([number, generation]))
        with requester.wait(requester.submit(body, pair.at_a.layout.page_bytes, 5.0)) as payload:
            return bytes(payload)

    with pytest.raises(StateConflict, match="not held"):
        ask(page.page, page.generation)
    [mine, *_] = stranger.match(chain("x"))
    assert ask(mine.page, mine.generation) == pair.at_a.contents([page])[0]
    with pytest.raises(StateConflict, match="generation"):
        ask(mine.page, mine.generation + 1)
    opened = stranger.update(1).pages[0]
    with pytest.raises(StateConflict, match="not sealed"):
        ask(opened.page, opened.generation)
    requester.close()
