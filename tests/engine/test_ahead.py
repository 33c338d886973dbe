"""Steps planned while the one before runs: as many as can be, and never another answer for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from services.contract.errors import Unavailable
from services.decoder.engine.host_pages import HostPage, LocalPages, PagesLost, SealOrder
from services.decoder.engine.limits import Limits
from services.decoder.engine.sequence import SampledToken, Sampling, Sequence
from services.decoder.engine.step_plan import StepPlan
from services.decoder.engine.stepper import StepFailed, Stepper
from services.decoder.kv.device_pages import DevicePages
from tests.engine.fake_runner import FakeRunner, UnderWay
from tests.engine.fake_stores import MoodyPages
from tests.engine.scheduler_rig import Rig, check_answer, expected, sequence

LIMITS = Limits(
    max_rows=6, max_model_len=240, max_step_tokens=24, max_waiting=50, block_tokens=4, page_tokens=8
)


def rig_of(
    limits: Limits = LIMITS, store: MoodyPages | None = None, *, pages: int = 200, ahead: bool = True
) -> Rig:
    """By default with room for everybody."""
    return Rig(limits, store or MoodyPages(pages, None), DevicePages(pages), ahead, shares=True)


def run_until(rig: Rig, one: Sequence, tokens: int) -> None:
    rig.step_until(lambda: len(one.generated) >= tokens)


def stops_after(tokens: int, most: int = 40) -> Sequence:
    """One whose last token nobody can foresee, beside a prompt of five."""
    found = (sequence(5, most, name=f"stops{seed}", seed=seed, stop=frozenset({7})) for seed in range(9999))
    return next(one for one in found if len(expected(one)) == tokens)


def test_prompts_arrive_and_every_step_but_the_first_is_ahead() -> None:
    """Longer ones than a step, one after the other, beside a row that decodes; all ends are foreseen."""
    rig = rig_of()
    talks = sequence(5, 150, name="talks")
    rig.submit(talks)
    run_until(rig, talks, 4)
    reads = []
    for number in range(5):
        reads.append(sequence(60 + number, 6, name=f"reads{number}", seed=number))
        rig.submit(reads[-1])
        for _ in range(14):
            rig.step()
    run_until(rig, talks, 140)
    assert all(one.finish for one in reads)
    assert rig.runner.launched["idle"] == 1
    assert set(rig.runner.launched) == {"idle", "ahead"}
    rig.finish()
    for one in [talks, *reads]:
        check_answer(rig, one)
    assert rig.fed == sum(len(one.prompt) + one.max_tokens - 1 for one in [talks, *reads]), "none in vain"


def test_a_burst_is_let_in_while_the_device_computes() -> None:
    rig = rig_of(replace(LIMITS, max_rows=4))
    talks = sequence(5, 150, name="talks")
    burst = [sequence(20 + number, 8, name=f"b{number}", seed=number) for number in range(12)]
    rig.submit(talks)
    run_until(rig, talks, 2)
    rig.submit(*burst)
    rig.step_until(lambda: all(one.finish for one in burst))
    assert not talks.finish
    rig.finish()
    for one in [talks, *burst]:
        check_answer(rig, one)
    assert set(rig.runner.launched) == {"idle", "ahead"}
    assert rig.runner.launched["idle"] == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_like_prompts_are_computed_once(ahead: bool) -> None:
    """Who waits for what is being computed is let in when it is there, as without running ahead."""
    rig = rig_of(ahead=ahead)
    talks = sequence(5, 60, name="talks")
    rig.submit(talks)
    run_until(rig, talks, 2)
    alike = [sequence(50, 3, name=f"a{number}", common=50, seed=number) for number in range(3)]
    before = rig.fed
    rig.submit(*alike)
    rig.step_until(lambda: all(one.finish for one in alike))
    others = len(talks.generated) * 2 + sum(len(one.generated) for one in alike) + 12
    assert rig.fed - before < 50 + 2 * 8 + others, "50 of one prompt, the last page of the others"
    assert [one.cached for one in alike] == [0, 48, 48]
    if ahead:
        assert rig.runner.launched["prefix"] >= 1
    rig.finish()
    for one in [talks, *alike]:
        check_answer(rig, one)


def test_choices_of_a_request_share_its_prompt() -> None:
    rig = rig_of()
    talks = sequence(5, 60, name="talks")
    rig.submit(talks)
    run_until(rig, talks, 2)
    choices = [sequence(50, 9, name="n", choice=number, seed=number, common=50) for number in range(3)]
    rig.submit(*choices)
    rig.finish()
    for one in [talks, *choices]:
        check_answer(rig, one)
    assert [one.cached for one in choices] == [0, 48, 48]
    assert rig.runner.launched["ahead"] > 50


def test_one_that_stops_computes_once_in_vain_and_then_lets_go() -> None:
    rig = rig_of()
    talks, stops = sequence(5, 60, name="talks"), stops_after(12)
    rig.submit(talks, stops)
    run_until(rig, stops, 11)
    rig.step_until(lambda: stops.finish)
    assert stops.row is not None, "the step that runs names its row"
    assert stops.host_pages
    fed, free = rig.fed, rig.scheduler.limits.max_rows - len(rig.scheduler.running) - 1
    rig.step()
    assert rig.fed == fed + 1, "of the next step, it is no part"
    assert stops.row is None
    rig.submit(*(sequence(9, 9, name=f"next{number}") for number in range(free + 1)))
    rig.finish()
    assert rig.runner.launched["idle"] == 1
    check_answer(rig, stops)
    check_answer(rig, talks)


def test_aborted_in_the_midst_of_a_prompt() -> None:
    """Between its chunks, with one under way; its pages go back when that one is over."""
    rig = rig_of(replace(LIMITS, max_step_tokens=16))
    talks, reads = sequence(5, 90, name="talks"), sequence(100, 5, name="reads")
    rig.submit(talks, reads)
    rig.step_until(lambda: reads.computed > 30)
    held, lent = len(reads.host_pages), rig.host.lent
    assert held
    rig.abort("reads")
    assert rig.host.lent == lent
    assert reads.computed > 30
    computed = reads.computed
    for _ in range(3):
        rig.step()
    assert reads.computed == computed, "what ended is not booked"
    assert rig.host.lent <= lent - held + 1
    rig.finish()
    check_answer(rig, talks)


def test_what_cannot_be_decided_ahead_says_why() -> None:
    rig = rig_of(replace(LIMITS, max_rows=2, max_step_tokens=32))
    talks = sequence(5, 100, name="talks", priority=1)
    rig.submit(talks)
    run_until(rig, talks, 2)
    wordy = sequence(5, 4, name="wordy", priority=1)
    wordy.sampling = Sampling(logprobs=True)
    rig.submit(wordy)
    rig.step_until(lambda: wordy.finish)
    assert rig.runner.launched["logprobs"] == 4, "it is let in, then three steps; its end is foreseen"
    rig.submit(sequence(9, 40, name="low", priority=1))
    run_until(rig, talks, 20)
    rig.submit(sequence(9, 9, name="urgent", priority=0))
    rig.step_until(lambda: rig.scheduler.parkings)
    assert rig.runner.launched["priority"] == 1
    rig.finish()
    assert rig.runner.launched["resume"] >= 1
    check_answer(rig, talks)


def test_short_of_pages_somebody_must_give_way() -> None:
    rig = rig_of(replace(LIMITS, max_model_len=64), pages=9)
    one, other = sequence(20, 40, name="one"), sequence(20, 40, name="other")
    rig.submit(one, other)
    rig.finish()
    assert rig.runner.launched["pages"] >= 1
    assert rig.scheduler.parkings >= 1
    check_answer(rig, one)
    check_answer(rig, other)


class Away(MoodyPages):
    """A store that can be told not to answer."""

    away = False

    def exchange(
        self, give: list[HostPage], want: int, seals: Collection[SealOrder] = ()
    ) -> list[HostPage] | None:
        if self.away:
            raise Unavailable("the store is out of reach")
        return super().exchange(give, want, seals)


def test_a_store_that_goes_away_costs_nothing_that_runs() -> None:
    """It goes with one step under way and a prompt being let in; it comes back later."""
    store = Away(200, None)
    rig = rig_of(store=store)
    talks, reads = sequence(5, 60, name="talks"), sequence(70, 5, name="reads")
    rig.submit(talks)
    run_until(rig, talks, 5)
    said = len(talks.generated)
    store.away = True
    rig.submit(reads)
    for _ in range(6):
        rig.step()
    assert said < len(talks.generated) <= said + 3, "what was under way is told"
    store.away = False
    rig.finish()
    assert rig.runner.launched["store"] >= 1
    check_answer(rig, talks)
    check_answer(rig, reads)


class Breaking(FakeRunner):
    """Fails when told to: at a launch, at that of a step's rest, or when the tokens are to come."""

    at_launch = at_complete = at_collect = False

    def launch(self, plan: StepPlan) -> UnderWay:
        if self.at_launch and plan.ahead:
            raise RuntimeError("out of memory")
        step = super().launch(plan)
        if self.at_complete:
            step.complete = self.fail  # type: ignore[method-assign,assignment]  # what torch would do there
        if self.at_collect:
            step.collect = self.fail  # type: ignore[method-assign]  # what torch would do there
        return step

    def fail(self) -> dict[int, SampledToken]:
        raise RuntimeError("a kernel failed")


@pytest.mark.parametrize("where", ["launch", "complete", "collect"])
def test_a_failure_ends_whoever_is_under_way_and_nobody_else(where: str) -> None:
    """Two steps are: one ends with the first, and one was let in by the second."""
    rig = rig_of(replace(LIMITS, max_rows=3))
    rig.runner = runner = Breaking(rig.limits, runs_ahead=True)
    rig.stepper = Stepper(rig.scheduler, runner, nullcontext())
    ends, talks, new, waits = (
        sequence(5, tokens, name=name)
        for name, tokens in (("ends", 6), ("talks", 60), ("new", 30), ("waits", 3))
    )
    rig.submit(ends, talks)
    run_until(rig, ends, 5 if where == "launch" else 4)
    if where == "launch":
        runner.at_launch = True
    else:
        runner.at_complete, runner.at_collect = where == "complete", where == "collect"
        rig.step()  # of one launched before
    rig.submit(new, waits)
    if where == "launch":
        rig.step()  # what runs is not to blame
        assert ends.finish is not None
    with pytest.raises(StepFailed) as failed:
        rig.step()
    assert set(failed.value.sequences) == {talks, new} | (set() if where == "launch" else {ends})
    runner.at_launch = runner.at_complete = runner.at_collect = False
    runner.under_way.clear()
    for one in failed.value.sequences:
        rig.scheduler.fail(one, "failed")
        rig.ended.append(one)
    rig.check()
    rig.finish()
    check_answer(rig, waits)


def test_rows_that_a_dropped_plan_was_to_leave_are_left_by_the_next() -> None:
    """A row had ended; the step that was to tell the device so is planned, and the one before it fails."""
    rig = rig_of(replace(LIMITS, max_rows=3))
    rig.runner = runner = Breaking(rig.limits, runs_ahead=True)
    rig.stepper = Stepper(rig.scheduler, runner, nullcontext())
    ends, talks = sequence(5, 6, name="ends"), sequence(5, 40, name="talks")
    rig.submit(ends, talks)
    rig.step_until(lambda: len(ends.generated) == 5)
    runner.at_complete = True  # of the step that is launched now, without the one that ends
    rig.step()
    assert ends.finish is not None
    with pytest.raises(StepFailed) as failed:
        rig.step()
    runner.at_complete = False
    runner.under_way.clear()
    for one in failed.value.sequences:
        rig.scheduler.fail(one, "failed")
        rig.ended.append(one)
    others = [sequence(5, 9, name=str(number)) for number in range(3)]
    rig.submit(*others)
    rig.finish()
    for one in others:
        check_answer(rig, one)


class Losing(LocalPages):
    """A store that can be told to lose everything."""

    lost = False

    def exchange(
        self, give: list[HostPage], want: int, seals: Iterable[SealOrder] = ()
    ) -> list[HostPage] | None:
        if self.lost:
            raise PagesLost("gone")
        return super().exchange(give, want, list(seals))


def test_lost_pages_are_told_with_a_step_under_way() -> None:
    store = MoodyPages(200, None)
    store.pages = losing = Losing(200)
    rig = rig_of(store=store)
    talks, leaves = sequence(5, 60, name="talks"), sequence(5, 60, name="leaves")
    rig.submit(talks, leaves)
    rig.step_until(lambda: talks.computed == 8)  # a page to be sealed, with the step that is planned next
    rig.abort("leaves")
    assert leaves.row == 1
    losing.lost = True
    with pytest.raises(PagesLost):
        rig.step()
    losing.lost = False
    assert leaves.row is None, "nothing is under way for it any more"
    rig.runner.under_way.clear()
    rig.scheduler.fail(talks, "gone")
    rig.ended.append(talks)
    rig.finish()
