"""The same bytes over every transport, at any size and alignment, and refusals of the same class."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from services.contract.errors import InvalidRequest, StateConflict
from services.contract.transport.counters import TransportCounters
from services.contract.transport.frame import MAX_REPLY_BYTES
from services.contract.transport.mapped import MappedRequester
from services.contract.transport.protocol import Requester
from tests.contract.transport.peer import REMOTE, Peer
from tests.contract.transport.slices import MEMORY_BYTES, SESSION, Piece, Slices, expected, question
from tests.nixl import over

TRANSPORTS = over(["mapped", *REMOTE, "nixl-tcp"], ["nixl-shm"])
SIZES = (0, 1, 15, 63, 64, 65, 1152, 4096, 8127, 8192, 8193, 65_535, 65_537, 300_001, 2**20 + 1, 5_000_003)


@pytest.fixture(scope="module", params=TRANSPORTS)
def asker(request: pytest.FixtureRequest) -> Iterator[Requester]:
    if request.param == "mapped":
        yield MappedRequester(Slices(), SESSION, TransportCounters())
        return
    with Peer(request.param) as peer:
        requester = peer.requester()
        yield requester
        requester.close()
        peer.rest()


@pytest.fixture(scope="module")
def source() -> memoryview:
    return Slices().memory


def ask(asker: Requester, pieces: list[Piece], room: int | None = None) -> bytes:
    length = sum(length for _, length in pieces)
    with asker.wait(asker.submit(question(pieces), length if room is None else room, 20.0)) as payload:
        return bytes(payload)


@pytest.mark.parametrize("size", SIZES)
def test_one_piece_of_any_size(asker: Requester, source: memoryview, size: int) -> None:
    for offset in (0, 1, 4095):
        assert ask(asker, [(offset, size)]) == expected([(offset, size)], source)


def test_many_pieces_at_random(asker: Requester, source: memoryview) -> None:
    dice = random.Random(11)
    for _ in range(60):
        pieces = []
        for _ in range(dice.randint(1, 300)):
            length = dice.choice((1, 7, 512, 1152, dice.randint(1, 9000)))
            pieces.append((dice.randrange(MEMORY_BYTES - length), length))
        room = sum(length for _, length in pieces) + dice.randint(0, 5000)
        assert ask(asker, pieces, room) == expected(pieces, source)


def test_several_at_once_in_any_order(asker: Requester, source: memoryview) -> None:
    most = asker.capabilities.in_flight
    dice = random.Random(12)
    for _ in range(20):
        asked = []
        for _ in range(most):
            piece = (dice.randrange(2**20), dice.choice((10, 5000, 400_000)))
            asked.append((piece, asker.submit(question([piece]), piece[1], 20.0)))
        with pytest.raises(StateConflict):
            asker.submit(b"", 1, 1.0)
        dice.shuffle(asked)
        replies = [(piece, asker.wait(ticket)) for piece, ticket in asked]
        for piece, reply in replies:  # answers stay what they are until they are released
            with reply as payload:
                assert bytes(payload) == expected([piece], source)


def test_a_refusal_is_the_services_own_and_ends_nothing(asker: Requester, source: memoryview) -> None:
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="there is nothing at"):
            ask(asker, [(MEMORY_BYTES, 1)])
        with pytest.raises(InvalidRequest, match="no room"):
            ask(asker, [(0, 10)], 9)
        assert ask(asker, [(3, 9)]) == expected([(3, 9)], source)


def test_what_is_too_long_is_refused_before_it_leaves(asker: Requester) -> None:
    with pytest.raises(InvalidRequest):
        asker.submit(bytes(2**20 + 1), 1, 1.0)
    with pytest.raises(InvalidRequest):
        asker.submit(b"", MAX_REPLY_BYTES + 1, 1.0)


def test_the_lanes_are_told(asker: Requester, request: pytest.FixtureRequest) -> None:
    kinds = {
        "mapped": ("mapped/",),
        "tcp": ("tcp/127",),
        "ucx-shm": ("sysv/", "posix/"),
        "ucx-tcp": ("tcp/lo",),
        "nixl-shm": ("may/sm",),
        "nixl-tcp": ("may/tcp",),
    }
    wanted = kinds[request.node.callspec.params["asker"]]
    assert asker.lanes
    assert all(lane.startswith(wanted) for lane in asker.lanes)


def test_what_is_not_promised_is_said(asker: Requester, request: pytest.FixtureRequest) -> None:
    answered = request.node.callspec.params["asker"] in REMOTE  # by someone, who looks at the key
    told = asker.capabilities
    assert (told.keyed, told.summed, told.slots) == (answered, answered, answered)
    assert told.remote == (request.node.callspec.params["asker"] != "mapped")
