"""The scheduler and the capacity book: who decodes has slots, who has none waits, in steps ahead as well."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decoder.engine.capacity_book import CapacityBook
from services.decoder.engine.host_pages import LocalPages
from services.decoder.engine.limits import Limits
from services.decoder.engine.scheduler import Scheduler
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.step_plan import StepPlan
from services.decoder.engine.stepper import Stepper
from services.decoder.kv.device_pages import DevicePages
from services.decoder.kv.hot_class import HotClass
from tests.engine.fake_runner import FakeRunner, UnderWay, answer

BLOCK_TOKENS, PARCEL_SLOTS = 4, 2
LIMITS = Limits(
    max_rows=6,
    max_model_len=256,
    max_step_tokens=64,
    max_waiting=50,
    block_tokens=BLOCK_TOKENS,
    page_tokens=8,
)


class SlotRunner(FakeRunner):
    """Also keeps what a device would know of parcels."""

    def __init__(self, quest: HotClass, *, runs_ahead: bool) -> None:
        super().__init__(LIMITS, runs_ahead=runs_ahead)
        self.quest = quest
        self.parcels: dict[int, list[int]] = {}
        self.resized = self.most_rows = 0

    def begin(self, plan: StepPlan) -> UnderWay:
        for row in plan.left_rows:
            self.parcels.pop(row, None)
        for number, row, parcels in plan.resizes:
            assert number == 0
            others = {parcel for other, held in self.parcels.items() if other != row for parcel in held}
            assert not others & set(parcels), "a parcel of two rows"
            self.parcels[row] = parcels
            self.resized += 1
        for sequence in plan.decodes:
            self.check(sequence, plan.position(sequence) + 1)
        for sequence in plan.seats:
            self.check(sequence, sequence.computed + 1)
        for sequence, _, end in plan.chunks:
            if end == len(sequence.prompt):
                self.check(sequence, end + 1)
        self.most_rows = max(self.most_rows, len(plan.decodes))
        return super().begin(plan)

    def check(self, sequence: Sequence, tokens: int) -> None:
        assert sequence.row is not None
        held = len(self.parcels.get(sequence.row, []))
        blocks = -(-tokens // BLOCK_TOKENS)
        assert held >= min(self.quest.floor, -(-blocks // PARCEL_SLOTS)), "a row decodes without its slots"


class Rig:
    def __init__(self, parcels: int, floor: int, *, ahead: bool = False) -> None:
        quest = HotClass(3, parcels, PARCEL_SLOTS, floor, min(32, parcels))
        self.runner = SlotRunner(quest, runs_ahead=ahead)
        book = CapacityBook([quest], BLOCK_TOKENS)
        self.scheduler = Scheduler(LIMITS, LocalPages(300), DevicePages(300), None, book)
        self.stepper = Stepper(self.scheduler, self.runner, nullcontext())

    def step(self) -> None:
        self.stepper.step()
        self.scheduler.check_integrity()

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.stepper.has_work:
                break
            self.step()
        assert not self.stepper.has_work, "somebody waits for ever"
        self.stepper.step()
        assert self.scheduler.hot.fits(256)
        assert self.scheduler.hot.capacities()[:3] == (0, 0, 0)


def ask(name: str, prompt: int, tokens: int, priority: int = 0) -> Sequence:
    tokens_of = [ord(name[0]) % 50, *((i * 7 + prompt) % 50 for i in range(prompt - 1))]
    return Sequence(name, 0, tokens_of, Sampling(), seed=1, max_tokens=tokens, priority=priority)


def check_answers(sequences: list[Sequence]) -> None:
    for one in sequences:
        assert one.generated == answer(one.prompt, one.seed, one.max_tokens, one.stop_ids, 0)


def test_who_finds_no_floor_waits_and_is_served() -> None:
    rig = Rig(parcels=8, floor=4)
    wanted = [ask(name, 100, 40) for name in "abcde"]
    for sequence in wanted:
        rig.scheduler.submit([sequence])
    while len(rig.scheduler.running) < 2:
        rig.step()
    for _ in range(20):
        rig.step()
        assert len(rig.scheduler.running) == 2, "8 parcels are two floors of 4; six rows there are"
    assert rig.scheduler.hot.capacities().least_tokens == rig.scheduler.hot.capacities().most_tokens == 32
    rig.finish()
    check_answers(wanted)
    assert rig.runner.most_rows == 2


def test_a_short_one_needs_less_than_a_floor() -> None:
    rig = Rig(parcels=9, floor=4)
    wanted = [ask("a", 100, 40), ask("b", 100, 40), ask("c", 5, 3)]
    for sequence in wanted:
        rig.scheduler.submit([sequence])
    for _ in range(8):
        rig.step()
    assert rig.runner.most_rows == 3
    rig.finish()
    check_answers(wanted)


def test_alone_a_row_is_whole_and_grows_in_steps_ahead() -> None:
    rig = Rig(parcels=60, floor=2, ahead=True)
    (one,) = wanted = [ask("a", 60, 120)]
    rig.scheduler.submit(wanted)
    while rig.scheduler.has_work:
        rig.step()
        if one.generated and not one.finish:
            assert rig.scheduler.hot.capacities().whole == 1
    rig.finish()
    check_answers(wanted)
    assert rig.runner.resized > 4
    assert rig.runner.launched == {"idle": 1, "ahead": 119}, "its prompt, and every token after its first"


def test_an_abort_gives_its_slots_to_others() -> None:
    rig = Rig(parcels=20, floor=2)
    wanted = [ask("a", 150, 60), ask("b", 150, 60)]
    for sequence in wanted:
        rig.scheduler.submit([sequence])
    while not all(sequence.generated for sequence in wanted):
        rig.step()
    assert rig.scheduler.hot.capacities().most_tokens == 10 * 8
    rig.scheduler.abort("b", set())
    rig.step()
    assert rig.scheduler.hot.capacities().least_tokens == 20 * 8
    rig.finish()


def test_nobody_is_parked_for_slots_that_would_not_be_enough() -> None:
    rig = Rig(parcels=6, floor=4)
    old, late = ask("a", 100, 30), ask("b", 5, 11, priority=1)
    for sequence in (old, late):
        rig.scheduler.submit([sequence])
    while not late.generated:
        rig.step()
    rig.scheduler.submit([ask("c", 100, 10)])
    while not late.finish:
        rig.step()
        assert rig.scheduler.parkings == 0, "2 of 6 parcels would come free, and 4 are needed"
    rig.finish()
    urgent = Rig(parcels=6, floor=4)
    slow, quick = ask("a", 100, 60, priority=1), ask("b", 100, 10)
    urgent.scheduler.submit([slow])
    while not slow.generated:
        urgent.step()
    urgent.scheduler.submit([quick])
    urgent.finish()
    assert urgent.scheduler.parkings == 1
    check_answers([slow, quick])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.integers(2, 5), st.integers(1, 6), st.booleans())
def test_any_traffic_is_served_with_slots(seed: int, floor: int, floors: int, ahead: bool) -> None:
    chance = random.Random(seed)
    rig = Rig(parcels=floor * floors + chance.randrange(4), floor=floor, ahead=ahead)
    wanted = []
    for number in range(10):
        wanted.append(ask(f"{chr(97 + number)}", chance.randint(1, 120), chance.randint(1, 80)))
        rig.scheduler.submit([wanted[-1]])
        for _ in range(chance.randrange(12)):
            if rig.stepper.has_work:
                rig.step()
        if chance.random() < 0.2:
            victim = chance.choice(wanted)
            if not victim.finish:
                rig.scheduler.abort(victim.request_id, set())
                wanted.remove(victim)
    rig.finish()
    check_answers(wanted)


@pytest.mark.parametrize("ahead", [False, True])
def test_without_a_book_nothing_changes(ahead: bool) -> None:
    scheduler = Scheduler(LIMITS, LocalPages(300), DevicePages(300))
    runner = FakeRunner(LIMITS, runs_ahead=ahead)
    stepper = Stepper(scheduler, runner, nullcontext(), lambda plan: plans.append(plan))
    plans: list[StepPlan] = []
    one = ask("a", 20, 30)
    scheduler.submit([one])
    while stepper.has_work:
        stepper.step()
    check_answers([one])
    assert not [plan for plan in plans if plan.resizes]
