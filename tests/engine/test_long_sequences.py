"""A sequence of many pages costs the host a step each: when its row is left, when it is found, when it gets
its pages. Others decode meanwhile, and whoever has few pages is let in at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine import admission, ahead
from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import FEW_GIVEN
from services.decoder.engine.sequence import Finish, Sequence
from services.decoder.engine.step_plan import StepPlan
from services.decoder.engine.stepper import Stepper
from services.decoder.kv.device_pages import DevicePages
from tests.engine.fake_stores import MoodyPages
from tests.engine.scheduler_rig import Rig, check_answer, sequence
from tests.engine.test_ahead_traffic import MOMENTS, Moments, serve, servers

MANY = 20
"""Pages, in these tests."""

LIMITS = Limits(
    max_rows=6, max_model_len=2000, max_step_tokens=128, max_waiting=50, block_tokens=4, page_tokens=8
)
LONG, SHORT = 50 * 8, 2 * 8  # tokens, of prompts that are known


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (admission, ahead):
        monkeypatch.setattr(room, "MANY_PAGES", MANY)


class Noted:
    """A server where one decodes all the while; the plans of its steps, and what each of them asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = Rig(LIMITS, MoodyPages(2000, None), DevicePages(2000), True, shares=True)
        self.rig.scheduler._admission._loads_beside = True
        self.plans: list[StepPlan] = []
        self.found: list[int] = []  # pages, by step
        self.given: list[int | None] = []  # at most, by exchange
        self.rig.stepper = Stepper(self.rig.scheduler, self.rig.runner, nullcontext(), self.plans.append)
        first = sequence(LONG + 1, 1, name="first", common=LONG)
        self.rig.submit(first)
        self.rig.finish()
        self.talks = sequence(5, 900, name="talks")
        self.rig.submit(self.talks)
        self.rig.step_until(lambda: len(self.talks.generated) == 5)  # and its page has room
        self._watch(monkeypatch)

    def _watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        desk = self.rig.scheduler._desk
        match, exchange = desk.match, desk.exchange

        def matched(one: Sequence) -> list[HostPage]:
            pages = match(one)
            self.found.append(len(pages))
            return pages

        def exchanged(want: int, most: int | None = None) -> list[HostPage] | None:
            self.given.append(most)
            return exchange(want, most)

        monkeypatch.setattr(desk, "match", matched)
        monkeypatch.setattr(desk, "exchange", exchanged)

    def steps(self) -> Iterator[StepPlan]:
        """One after the other: the plan that each launched ahead."""
        while True:
            self.plans.clear()
            self.found.clear()
            self.given.clear()
            self.rig.step()
            assert len(self.plans) == 1, "a step was not planned ahead"
            yield self.plans[0]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(monkeypatch)


def test_it_gets_its_pages_a_step_after_it_was_found(server: Noted) -> None:
    newcomer = sequence(LONG + 5, 4, name="newcomer", common=LONG)
    server.rig.submit(newcomer)
    steps = server.steps()
    plan = next(steps)
    assert server.found == [LONG // 8]
    assert [*plan.newcomers, *plan.arrivals, *server.given] == [], "the step did more"
    plan = next(steps)
    assert plan.newcomers == [newcomer]
    assert [len(arrival.loads) for arrival in plan.arrivals] == [LONG // 8]
    assert server.given == [FEW_GIVEN]
    server.rig.finish()
    check_answer(server.rig, newcomer)


def test_so_it_is_where_they_are_on_the_device_already(server: Noted) -> None:
    """It waits for nothing beside the steps, and has a chunk in the second of them."""
    elder = sequence(LONG + 5, 300, name="elder", common=LONG)
    server.rig.submit(elder)
    server.rig.step_until(lambda: elder.generated)
    newcomer = sequence(LONG + 5, 4, name="newcomer", common=LONG)
    server.rig.submit(newcomer)
    steps = server.steps()
    plan = next(steps)
    assert server.found == [LONG // 8]
    assert [*plan.chunks, *plan.newcomers] == []
    plan = next(steps)
    assert [chunk.sequence for chunk in plan.chunks] == [newcomer]
    server.rig.finish()
    check_answer(server.rig, newcomer)


def test_a_short_one_does_not_wait(server: Noted) -> None:
    newcomer = sequence(SHORT + 5, 4, name="newcomer", common=SHORT)
    server.rig.submit(newcomer)
    plan = next(server.steps())
    assert plan.newcomers == [newcomer]
    assert plan.arrivals


@pytest.mark.parametrize(("tokens", "waits"), [(LONG, True), (SHORT, False)])
def test_no_other_long_one_is_let_in_where_one_gets_its_pages(
    server: Noted, tokens: int, waits: bool
) -> None:
    long = sequence(LONG + 5, 4, name="long", common=LONG)
    other = sequence(tokens + 5, 4, name="other", common=tokens)
    server.rig.submit(long)
    steps = server.steps()
    next(steps)
    server.rig.submit(other)
    assert long in next(steps).newcomers
    assert (other in server.rig.scheduler.waiting) is waits
    next(steps)
    assert other not in server.rig.scheduler.waiting


@pytest.mark.parametrize("left", [LONG, SHORT])
@pytest.mark.parametrize("tokens", [LONG, SHORT])
def test_no_long_one_is_let_in_where_one_has_left(server: Noted, left: int, tokens: int) -> None:
    leaver = sequence(left + 5, 6, name="leaver", common=left)
    server.rig.submit(leaver)
    steps = server.steps()
    while not leaver.finish:
        next(steps)
    newcomer = sequence(tokens + 5, 4, name="newcomer", common=tokens)
    server.rig.submit(newcomer)
    while not next(steps).left_rows:
        pass
    waits = (left, tokens) == (LONG, LONG)
    assert (newcomer in server.rig.scheduler.waiting) is waits
    if waits:
        assert server.given == [FEW_GIVEN]
    next(steps)
    assert newcomer not in server.rig.scheduler.waiting


def test_where_one_leaves_after_the_other_no_row_stays_empty_for_it(server: Noted) -> None:
    """Only the first of them is waited for, and who was found gets its pages though another is found."""
    server.rig.scheduler._device._shared = False  # or nothing were to be loaded for them
    leavers = [sequence(LONG + 5, 300, name=str(number), common=LONG) for number in range(4)]
    for one in leavers:
        server.rig.submit(one)
    server.rig.step_until(lambda: all(one.generated for one in leavers))
    for number, one in enumerate(leavers):
        one.max_tokens = len(one.generated) + 6 + number
    newcomers = [sequence(LONG + 5, 4, name=f"new {number}", common=LONG) for number in range(2)]
    steps = server.steps()
    while not next(steps).left_rows:
        pass
    for one in newcomers:
        server.rig.submit(one)
    found = []
    for _ in range(2):
        plan = next(steps)
        assert plan.left_rows
        found.append(len(server.found))
    assert plan.newcomers == newcomers[:1]
    assert found == [1, 1], "a long one waited where the step before had many pages to deal with as well"


@settings(max_examples=300, deadline=None)
@given(servers(), st.integers(0, 2**32), MOMENTS, st.booleans(), st.sampled_from([0, 1, 3]))
def test_any_history(server: tuple[Limits, int], seed: int, moments: Moments, moody: bool, many: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for room in (admission, ahead):
            patch.setattr(room, "MANY_PAGES", many)
        rig, asked = serve(server, seed, moments, moody=moody, ahead=True, late=True)
    for one in asked:
        if one.finish is not Finish.ABORT:
            check_answer(rig, one)
