"""Who gets a row, who has to give one up, and what that costs: the rules of docs/decisions/0013."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from services.contract.errors import Unavailable
from services.decoder.engine.admission import MOST_PASSED
from services.decoder.engine.host_pages import HostPage, SealOrder
from services.decoder.engine.sequence import Finish, Sequence
from tests.engine.scheduler_rig import PATIENCE, Rig, check_answer, sequence


def work(*sequences: Sequence) -> int:
    """Tokens to compute if nothing is computed twice."""
    return sum(len(one.prompt) + max(0, one.max_tokens - 1) for one in sequences)


def test_an_urgent_one_takes_a_row_and_the_parked_one_loses_nothing() -> None:
    rig = Rig.make(max_rows=1, host=16, device=16)
    low, high = sequence(10, 20, name="low", priority=1), sequence(9, 6, name="high")
    rig.submit(low)
    rig.step_until(lambda: len(low.generated) == 5)
    pages = list(low.host_pages)
    rig.submit(high)
    rig.step()
    assert (low.row, low.host_pages, low.device_pages) == (None, pages, [])
    assert high.row == 0
    rig.finish()
    assert rig.ended == [high, low]
    check_answer(rig, low)
    check_answer(rig, high)
    assert rig.fed == work(low, high)
    assert (rig.scheduler.parkings, rig.scheduler.releases) == (1, 0)


def test_a_prompt_is_parked_between_its_chunks() -> None:
    rig = Rig.make(max_rows=1, host=16, device=16, max_step_tokens=10, max_model_len=100)
    low, high = sequence(50, 3, name="low", priority=1), sequence(5, 3, name="high")
    rig.submit(low)
    rig.step_until(lambda: low.computed > 20)
    rig.submit(high)
    rig.step()
    assert low.is_parked
    rig.finish()
    check_answer(rig, low)
    assert rig.fed == work(low, high)


def test_equals_never_take_a_row_from_each_other() -> None:
    rig = Rig.make(max_rows=1, host=16, device=16)
    first, second = sequence(5, 20, name="first"), sequence(5, 3, name="second")
    rig.submit(first)
    rig.step()
    rig.submit(second)
    rig.finish()
    assert rig.ended == [first, second]
    assert rig.scheduler.parkings == 0


def test_of_those_that_run_the_least_urgent_then_youngest_goes() -> None:
    rig = Rig.make(max_rows=3, host=16, device=16)
    old, young, lower = (
        sequence(5, 20, name="old", priority=1),
        sequence(5, 20, name="young", priority=1),
        sequence(5, 20, name="lower", priority=2),
    )
    rig.submit(lower, old, young)
    rig.step()
    rig.submit(sequence(5, 20, name="a"))
    rig.step()
    assert [one.is_parked for one in (lower, young, old)] == [True, False, False]
    rig.submit(sequence(5, 20, name="b"))
    rig.step()
    assert [one.is_parked for one in (lower, young, old)] == [True, True, False]
    rig.finish()


def test_a_resumed_row_is_left_alone_for_a_page_of_tokens() -> None:
    """However many urgent ones come: each waits for its turn, and the low one is not starved."""
    rig = Rig.make(max_rows=1, host=16, device=16, max_waiting=99, page_tokens=8)
    low = sequence(5, 40, name="low", priority=1)
    rig.submit(low)
    rig.step_until(lambda: low.generated)
    came = stays = 0
    while low.finish is None:
        before = low.computed
        rig.submit(sequence(3, 2, name=f"high {came}"))
        came += 1
        rig.step_until(lambda: low.is_parked or low.finish)
        stays = max(stays, low.computed - before)
        assert low.finish or came == 1 or low.computed - before >= 8 - 1
        rig.step_until(lambda: low.row is not None or low.finish)
    rig.finish()
    assert came >= 3
    check_answer(rig, low)


def test_short_of_device_pages_a_row_is_parked() -> None:
    rig = Rig.make(max_rows=2, host=20, device=7, max_model_len=56)
    one, other = sequence(20, 30, name="one"), sequence(20, 30, name="other")
    rig.submit(one, other)
    rig.finish()
    check_answer(rig, one)
    check_answer(rig, other)
    assert rig.scheduler.parkings > 0
    assert rig.scheduler.releases == 0
    assert rig.fed == work(one, other)


def test_short_of_host_pages_the_parked_lose_theirs_first() -> None:
    rig = Rig.make(max_rows=2, host=9, device=20, max_model_len=72)
    first, parked = sequence(10, 50, name="first"), sequence(20, 20, name="parked", priority=2)
    second = sequence(10, 40, name="second", priority=1)
    rig.submit(first, parked)
    rig.step_until(lambda: parked.generated)
    rig.submit(second)
    rig.step()
    assert parked.is_parked
    rig.step_until(lambda: rig.scheduler.releases)
    assert not parked.host_pages
    assert rig.scheduler.running == [first, second]
    assert rig.scheduler.parkings == 1
    rig.finish()
    for one in (first, second, parked):
        check_answer(rig, one)


def test_all_rows_want_a_page_at_once_and_none_is_free() -> None:
    """The pages are taken up to the last one, and every row stands at its page's end."""
    rig = Rig.make(max_rows=4, host=8, device=8, page_tokens=8, max_model_len=64, max_step_tokens=80)
    crowd = [sequence(9, 30, name=str(i), seed=i) for i in range(4)]
    rig.submit(crowd[0])
    rig.step()
    for one in crowd[1:]:  # admission would keep a page for each; these come by way of the others' ends
        rig.submit(one)
    ends = 0
    for _ in range(PATIENCE):
        if not rig.scheduler.has_work:
            break
        before = crowd[0].finish or len(crowd[0].generated)
        rig.step()
        after = crowd[0].finish or len(crowd[0].generated)
        assert before != after or crowd[0].finish, "the oldest must go on in every step"
        ends += rig.host.free == 0
    rig.finish()
    for one in crowd:
        check_answer(rig, one)
    assert ends > 0, "there was always a page left"


def test_who_does_not_fit_is_passed_by_a_few_and_then_waited_for() -> None:
    rig = Rig.make(max_rows=3, host=10, device=30, max_waiting=99, max_model_len=80, max_step_tokens=64)
    rig.submit(sequence(5, 35, name="runs"))
    rig.step()
    big = sequence(60, 10, name="big")
    small = [sequence(5, 2, name=str(number)) for number in range(3 * MOST_PASSED)]
    rig.submit(big)
    for one in small:
        rig.submit(one)
    counted = 0
    while big not in rig.ended:
        rig.step()
        counted = max(counted, big.passed)
    assert counted == MOST_PASSED
    assert big.passed == 0, "it would begin anew, had it to wait again"
    rig.finish()
    before = rig.ended.index(big)
    passed = [one for one in rig.ended[:before] if one in small]
    assert len(passed) == MOST_PASSED
    assert passed == small[:MOST_PASSED], "those who pass do so in order"


def test_choices_that_wait_for_their_prompt_do_not_hold_up_the_others() -> None:
    rig = Rig.make(
        max_rows=4, host=40, device=40, shares=True, max_step_tokens=20, max_waiting=9, max_model_len=90
    )
    choices = [sequence(50, 4, choice=i, common=50, seed=i) for i in range(3)]
    other = sequence(4, 2, name="other")
    rig.submit(*choices)
    rig.submit(other)
    rig.step_until(lambda: other.row is not None)
    assert [one.row is None for one in choices] == [False, True, True]
    rig.finish()
    for one in (*choices, other):
        check_answer(rig, one)


def test_one_that_does_not_fit_costs_no_match_a_step() -> None:
    rig = Rig.make(shares=True, max_rows=3, host=10, device=30, max_model_len=80)
    runs, big = sequence(5, 40, name="runs"), sequence(60, 10, name="big")
    rig.submit(runs)
    rig.step()
    rig.submit(big)
    matches = 0
    found = rig.host.pages.match

    def match(page_hashes: list[bytes]) -> object:
        nonlocal matches
        matches += 1
        return found(page_hashes)

    rig.host.pages.match = match  # type: ignore[assignment,method-assign]  # counted
    rig.step_until(lambda: runs.finish)
    assert 1 <= matches <= 2
    rig.finish()
    check_answer(rig, big)


def test_host_pages_are_counted_whole_whatever_the_device_has() -> None:
    """Nine tokens and the next one take two pages of eight: two fit on five, with a page to spare."""
    rig = Rig.make(max_rows=4, host=5, device=99, page_tokens=8, max_model_len=40)
    crowd = [sequence(9, 4, name=str(i), seed=i) for i in range(3)]
    rig.submit(*crowd)
    rig.step()
    assert [one.row is not None for one in crowd] == [True, True, False]
    assert rig.host.free == 1
    rig.finish()
    assert rig.scheduler.releases == 0
    for one in crowd:
        check_answer(rig, one)


def test_a_store_that_refuses_for_long_costs_neither_pages_nor_answers() -> None:
    """Whoever was let in keeps what it has and tries again; an abort in between brings it back."""
    rig = Rig.make(max_rows=3, host=12, device=12, shares=True, max_waiting=9)
    runs, waits, leaves = (sequence(9, 20, name=name, priority=1) for name in ("runs", "waits", "leaves"))
    rig.submit(runs)
    rig.step_until(lambda: runs.generated)
    exchange, refusals = rig.host.exchange, 0

    def refuse(give: list[HostPage], want: int, seals: Collection[SealOrder] = ()) -> list[HostPage] | None:
        nonlocal refusals
        refusals += 1
        if refusals % 2:
            raise Unavailable("the store is out of reach")
        assert exchange(give, 0, seals) == []
        return None if want else []

    rig.host.exchange = refuse  # type: ignore[method-assign]  # for a while
    rig.submit(waits, leaves, sequence(9, 4, name="urgent"))
    for _ in range(60):
        rig.step()
    rig.abort("leaves")
    for _ in range(10):
        rig.step()
    assert refusals > 40
    rig.host.exchange = exchange  # type: ignore[method-assign]
    rig.finish()
    check_answer(rig, runs)
    check_answer(rig, waits)
    assert leaves.finish is Finish.ABORT


@pytest.mark.parametrize(("host", "device"), [(30, 10), (10, 30)])
def test_an_urgent_one_may_take_all_that_there_is(host: int, device: int) -> None:
    """Rows that it parks want no page beside it."""
    rig = Rig.make(max_rows=2, host=host, device=device, max_step_tokens=64, max_model_len=80)
    low = sequence(8, 60, name="low", priority=1)
    rig.submit(low)
    rig.step_until(lambda: low.generated)
    urgent = sequence(75, 2, name="urgent")
    rig.submit(urgent)
    rig.step()
    assert urgent.row is not None
    assert low.is_parked or not low.host_pages
    rig.finish()
    assert rig.ended == [urgent, low]
    check_answer(rig, low)
    check_answer(rig, urgent)
