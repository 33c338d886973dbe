"""Pages on their way back to the store: a step that others wait for gives few, and nobody lacks the rest."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.churn import Case, measure
from benchmarks.made_up_device import Costs
from services.contract.errors import Unavailable
from services.decoder.engine import ahead, scheduler
from services.decoder.engine.host_pages import HostPage, LocalPages, SealOrder
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import PageDesk
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import Finish
from services.decoder.engine.stepper import Stepper
from services.decoder.kv.device_pages import DevicePages
from tests.engine.fake_runner import FakeRunner
from tests.engine.fake_stores import OneOfTwo
from tests.engine.scheduler_rig import check_answer, sequence
from tests.engine.test_ahead_traffic import MOMENTS, Moments, serve, servers

LIMITS = Limits(
    max_rows=2, max_model_len=96, max_step_tokens=96, max_waiting=9, block_tokens=4, page_tokens=8
)


class Noted(LocalPages):
    """Writes down what comes back, and is out of reach on demand."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.given: list[list[HostPage]] = []
        self.away = False

    def exchange(
        self, give: list[HostPage], want: int, seals: Sequence[SealOrder] = ()
    ) -> list[HostPage] | None:
        if self.away:
            raise Unavailable("the store is out of reach")
        self.given.append(give)
        return super().exchange(give, want, seals)


def desk_with(pages: int, held: int) -> tuple[Noted, PageDesk, list[HostPage]]:
    store = Noted(pages)
    desk = PageDesk(store, None, 4)
    taken = desk.exchange(held)
    assert taken is not None
    store.given.clear()
    return store, desk, taken


def test_they_go_by_and_by_the_last_first() -> None:
    store, desk, mine = desk_with(100, 10)
    assert desk.give(mine) == 10
    assert desk.free == 100, "they count as free at once"
    while desk.gives_back:
        assert desk.exchange(0, 4) == []
        assert desk.free == 100
    assert store.given == [mine[6:], mine[2:6], mine[:2]]
    desk.check_integrity([])
    assert store.lent == 0


def test_all_go_at_once_where_nobody_waits() -> None:
    store, desk, mine = desk_with(100, 10)
    desk.give(mine)
    desk.exchange(0)
    assert store.given == [mine]


def test_where_room_is_short_as_many_go_as_make_it() -> None:
    store, desk, mine = desk_with(12, 10)
    desk.give(mine)
    taken = desk.exchange(7, 2)
    assert taken is not None
    assert store.given == [mine[5:]]
    desk.check_integrity(taken)


def test_who_was_mistaken_about_what_is_free_gives_the_rest() -> None:
    """Another client of the store has taken what this one took for free."""
    pages = LocalPages(12)
    mine, other = OneOfTwo(pages), OneOfTwo(pages)
    planner = Scheduler(LIMITS, mine, DevicePages(12))
    ended = sequence(70, 2, name="long")
    planner.submit([ended])
    stepper = Stepper(planner, FakeRunner(LIMITS), nullcontext())
    while ended.finish is None:
        stepper.step()
    assert other.exchange([], 3) is not None
    assert mine.free == 3, "as it was when it last asked"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "MOST_GIVEN", 1)
        planner.submit([sequence(20, 2, name="next")])
        stepper.step()
    assert planner.running, "it has its three pages"


def test_a_page_that_two_have_given_goes_once_and_is_free_once() -> None:
    store, desk, mine = desk_with(20, 3)
    again = store.match([])  # a second reference to each, as a match gives it
    assert again == []
    store._references.update(mine)
    desk._references.update(mine)
    assert desk.give(mine) == 0, "another here has them"
    assert desk.free == 17
    assert desk.give(mine[:2]) == 2
    assert desk.free == 19
    desk.exchange(0, 1)
    assert store.given == [[mine[2]]]
    assert desk.free == 19
    desk.exchange(0, 1)
    assert store.given[1] == [mine[1], mine[1]]
    desk.exchange(0)
    desk.check_integrity([mine[2]])
    assert store.references(mine[2]) == 1


def test_a_store_out_of_reach_has_taken_nothing() -> None:
    store, desk, mine = desk_with(20, 10)
    desk.give(mine)
    store.away = True
    with pytest.raises(Unavailable):
        desk.exchange(0, 4)
    assert desk.free == 20
    store.away = False
    for _ in range(3):
        desk.exchange(0, 4)
    assert store.given == [mine[6:], mine[2:6], mine[:2]]
    assert not desk.has_work


@settings(max_examples=100, deadline=None)
@given(
    servers(),
    st.integers(0, 2**32),
    MOMENTS,
    st.booleans(),
    st.booleans(),
)
def test_any_history_with_a_page_a_step(
    server: tuple[Limits, int], seed: int, moments: Moments, moody: bool, early: bool
) -> None:
    """Rows of a few pages that are given back one by one; the rig checks the books after every step."""
    with pytest.MonkeyPatch.context() as patch:
        for room in (ahead, scheduler):
            patch.setattr(room, "MOST_GIVEN", 1)
        patch.setattr(ahead, "FEW_GIVEN", 0)
        rig, asked = serve(server, seed, moments, moody=moody, ahead=early)
    for one in asked:
        if one.finish is not Finish.ABORT:
            check_answer(rig, one)


def test_the_benchmark_lets_everybody_in_and_sees_a_device_wait() -> None:
    """With a real store. One that computes in no time waits for the host nearly all of it."""
    found = measure(Case(16_384, 3), 3, Costs(decode=0, token=0))
    assert found["let_in"] == 6
    assert found["steps"] > 100
    assert 1e-3 * found["wait_ms"] * found["let_in"] > 0.5 * found["seconds"]


def test_a_seal_keeps_its_page_and_its_parent_back() -> None:
    store, desk, mine = desk_with(20, 6)
    desk._seals.append(SealOrder(mine[4], random.Random(1).randbytes(16), None))
    desk.give(mine)
    assert desk.free == 19, "what the exchange seals comes free one later"
    desk.exchange(0, 2)
    assert store.given == [[mine[3], mine[5]]]
    desk.exchange(0)
    assert desk.free == 20
    assert store.lent == 0
