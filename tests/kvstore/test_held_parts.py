"""Claims in parts: all of them in order or none, each client's own, and forgotten when nothing follows."""

from __future__ import annotations

import pytest
from hotset.v1 import kvstore_pb2 as pb

from services.contract.channel import MAX_MESSAGE_BYTES
from services.contract.errors import Unavailable
from services.decoder.engine import store_client
from services.kvstore.held_parts import HeldParts
from services.kvstore.page_refs import PageRef, PageRefs

SECONDS = 10.0


def refs(*pages: int) -> PageRefs:
    return PageRefs.of(PageRef(page, page + 100) for page in pages)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def parts(clock: Clock) -> HeldParts:
    return HeldParts(clock, SECONDS)


def test_parts_become_one_in_order_and_are_forgotten(parts: HeldParts) -> None:
    parts.add("a", refs(5, 6), 0)
    parts.add("b", refs(1), 0)
    parts.add("a", refs(2), 2)
    assert list(parts.whole("a", refs(6, 9), 3)) == list(refs(5, 6, 2, 6, 9))
    assert list(parts.whole("b", refs(), 1)) == list(refs(1))
    assert len(parts) == 0
    assert list(parts.whole("a", refs(7), 0)) == list(refs(7))


def test_a_first_part_begins_anew(parts: HeldParts) -> None:
    parts.add("a", refs(5, 6), 0)
    parts.add("a", refs(7), 0)
    assert list(parts.whole("a", refs(8), 1)) == list(refs(7, 8))


@pytest.mark.parametrize("before", [1, 3])
def test_a_part_that_does_not_follow_is_refused_and_the_claim_with_it(parts: HeldParts, before: int) -> None:
    for last in (parts.add, parts.whole):
        parts.add("a", refs(5, 6), 0)
        with pytest.raises(Unavailable, match=f"2 of the {before} pages .* from the first part"):
            last("a", refs(7), before)
        assert len(parts) == 0


def test_parts_that_nothing_follows_go_in_time(parts: HeldParts, clock: Clock) -> None:
    parts.add("a", refs(5), 0)
    clock.now = SECONDS - 1
    parts.add("a", refs(6), 1)
    clock.now = 2 * SECONDS - 2
    parts.add("b", refs(1), 0)
    assert len(parts) == 2, "it was heard of a moment ago"
    clock.now += 2
    with pytest.raises(Unavailable, match="0 of the 2"):
        parts.whole("a", refs(7), 2)
    assert len(parts) == 1


def test_a_part_of_the_largest_size_is_a_message_and_its_answer_is_one() -> None:
    request = pb.AttachRequest(session_token="f" * 32)
    numbers = [2**32 - 1] * store_client._MOST_HELD
    request.held_pages.pages.extend(numbers)
    request.held_pages.generations.extend(numbers)
    assert request.ByteSize() < 0.6 * MAX_MESSAGE_BYTES, "planes of a large model have room beside it"
