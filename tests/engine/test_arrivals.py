"""Pages that were found are loaded beside the steps: who waits for them joins later, the others go on."""

from __future__ import annotations

import random
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contract.errors import Unavailable
from services.decoder.engine.host_pages import HostPage, PagesLost, SealOrder
from services.decoder.engine.limits import Limits
from services.decoder.engine.page_desk import FEW_GIVEN
from services.decoder.engine.sequence import Finish
from services.decoder.engine.stepper import StepFailed, Stepper
from services.decoder.kv.device_pages import DevicePages
from tests.engine.fake_stores import MoodyPages
from tests.engine.scheduler_rig import Rig, check_answer, expected, sequence
from tests.engine.test_ahead import Breaking
from tests.engine.test_ahead_traffic import Moments, serve, servers


@settings(max_examples=400, deadline=None)
@given(
    servers(),
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 19)), min_size=1, max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_any_history(
    server: tuple[Limits, int], seed: int, moments: Moments, moody: bool, early: bool
) -> None:
    rig, asked = serve(server, seed, moments, moody=moody, ahead=early, late=True)
    for one in asked:
        if one.finish is not Finish.ABORT:
            check_answer(rig, one)


@settings(max_examples=400, deadline=None)
@given(servers(), st.integers(0, 2**32), st.booleans(), st.integers(2, 14))
def test_any_history_with_steps_that_fail(
    server: tuple[Limits, int], seed: int, early: bool, count: int
) -> None:
    """Whoever was under way ends; the others, arriving ones too, get their answers, and all books close."""
    limits, pages = server
    chance = random.Random(seed)
    mood = random.Random(seed) if chance.random() < 0.4 else None
    comes = random.Random(seed)
    rig = Rig(limits, MoodyPages(pages, mood), DevicePages(pages), early, shares=True, late=comes)
    rig.runner = runner = Breaking(
        limits, runs_ahead=early, references=rig.host.pages.references, chance=comes
    )
    rig.stepper = Stepper(rig.scheduler, runner, nullcontext())

    def step() -> None:
        runner.at_launch, runner.at_complete, runner.at_collect = (chance.random() < 0.02 for _ in range(3))
        try:
            rig.stepper.step()
        except Unavailable:
            pass
        except StepFailed as failed:
            runner.under_way.clear()
            for one in failed.sequences:
                if one.finish is None:
                    rig.scheduler.fail(one, "failed")
        rig.scheduler.check_integrity()

    asked = []
    most = min(limits.max_model_len, pages * limits.page_tokens)
    for number in range(count):
        prompt = chance.randint(1, most)
        common = chance.choice([0, prompt // 2, prompt])
        one = sequence(prompt, chance.randint(0, most - prompt), name=str(number), seed=number, common=common)
        one.priority = chance.choice([0, 0, 1, -1])
        asked.append(one)
        rig.scheduler.submit([one])
        for _ in range(chance.randint(0, 9)):
            step()
        if chance.random() < 0.2:
            rig.scheduler.abort(str(chance.randrange(number + 1)), set())
    for _ in range(6000):
        if not rig.stepper.has_work:
            break
        step()
    assert not rig.stepper.has_work, "somebody waits for ever"
    assert rig.host.lent == 0
    assert rig.device.free == rig.device.count
    for one in asked:
        if one.finish not in (Finish.ABORT, Finish.ERROR):
            assert one.generated == expected(one)


class Never(random.Random):
    """What is loaded comes when it is awaited, or after so many looks."""

    looks = 10**6

    def random(self) -> float:
        self.looks -= 1
        return 0.9 if self.looks > 0 else 0.1


class Away(MoodyPages):
    """Out of reach when told so."""

    away = False

    def exchange(
        self, give: list[HostPage], want: int, seals: Collection[SealOrder] = ()
    ) -> list[HostPage] | None:
        if self.away and want:
            raise Unavailable("away")
        return super().exchange(give, want, seals)


LIMITS = Limits(
    max_rows=6, max_model_len=2000, max_step_tokens=32, max_waiting=50, block_tokens=4, page_tokens=8
)


def known(rig: Rig, tokens: int) -> None:
    """The store has the beginning of prompts that have so much in common."""
    one = sequence(tokens + 1, 1, name="first", common=tokens)
    rig.submit(one)
    rig.finish()


@pytest.mark.parametrize("ahead", [False, True])
def test_pages_that_one_who_runs_will_load_are_not_loaded_beside(ahead: bool) -> None:
    """A newcomer's plan came to nothing; an urgent one took some of its pages, which hold nothing yet."""
    store = Away(2000, None)
    rig = Rig(LIMITS, store, DevicePages(2000), ahead, shares=True, late=Never())
    known(rig, 400)
    talks, victim = sequence(5, 300, name="talks"), sequence(5, 300, name="victim", priority=5)
    rig.submit(talks)
    rig.step_until(lambda: len(talks.generated) > 2)
    rig.submit(victim)
    rig.step_until(lambda: len(victim.generated) > 2)
    newcomer = sequence(450, 4, name="newcomer", priority=5, common=400)
    rig.submit(newcomer)
    store.away = True
    while not rig.scheduler._roster.arriving:
        rig.step()
    urgent = sequence(60, 4, name="urgent", priority=1, common=40)
    rig.submit(sequence(700, 4, name="long"), urgent)
    rig.step()
    rig.step()
    store.away = False
    rig.finish()
    for one in (urgent, newcomer):
        check_answer(rig, one)


def test_an_elder_does_not_give_way_to_a_younger_one_whose_pages_come() -> None:
    """Short of pages it keeps what it has until that one can give way."""
    come = Never()
    limits = replace(LIMITS, max_rows=3, max_step_tokens=64)
    rig = Rig(limits, MoodyPages(400, None), DevicePages(32), True, shares=True, late=come)
    known(rig, 160)
    elder, younger = sequence(5, 150, name="elder"), sequence(165, 60, name="younger", common=160)
    rig.submit(elder)
    rig.step_until(lambda: len(elder.generated) > 40)
    come.looks = 60
    rig.submit(younger)
    while not elder.finish:
        rig.step()
        assert elder.row is not None or elder.finish
    assert not younger.finish
    rig.finish()
    check_answer(rig, younger)


def test_a_plan_that_lets_one_arrive_gives_few_pages_back() -> None:
    rig = Rig(LIMITS, MoodyPages(2000, None), DevicePages(2000), True, shares=True, late=Never())
    known(rig, 400)
    talks = sequence(5, 300, name="talks")
    rig.submit(talks)
    rig.step_until(lambda: len(talks.generated) > 2)
    exchange, given = rig.scheduler._desk.exchange, []

    def noted(want: int, most: int | None = None) -> list[HostPage] | None:
        given.append((want, most))
        return exchange(want, most)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.scheduler._desk, "exchange", noted)
        rig.submit(sequence(450, 4, name="newcomer", common=400))
        rig.step()
        rig.step()
    assert [most for want, most in given if want > 1] == [FEW_GIVEN]


class Gone(MoodyPages):
    """Loses everything when told so."""

    gone = False

    def exchange(
        self, give: list[HostPage], want: int, seals: Collection[SealOrder] = ()
    ) -> list[HostPage] | None:
        if self.gone:
            raise PagesLost("gone")
        return super().exchange(give, want, seals)


@pytest.mark.parametrize("ahead", [False, True])
def test_lost_pages_are_waited_for_before_they_are_somebody_elses(ahead: bool) -> None:
    """The end of a newcomer's prompt, computed beside the steps, would write them."""
    store = Gone(2000, None)
    rig = Rig(LIMITS, store, DevicePages(2000), ahead, shares=True, late=Never())
    known(rig, 400)
    newcomer = sequence(450, 4, name="newcomer", common=400)
    rig.submit(newcomer)
    while not rig.scheduler._roster.arriving:
        rig.scheduler.arrived([])
        rig.runner.launch(rig.scheduler.plan())
    rig.submit(sequence(450, 4, name="other"))
    store.gone = True
    with pytest.raises(PagesLost):
        rig.stepper.step()
    assert not rig.runner.pending, "its pages are still being loaded"
    rig.scheduler.fail(newcomer, "gone")
    assert newcomer.row is None
