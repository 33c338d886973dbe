"""Pages that were found are loaded beside the steps: who waits for them joins later, the others go on."""

from __future__ import annotations

import random
from contextlib import nullcontext

from hypothesis import given, settings
from hypothesis import strategies as st

from services.contract.errors import Unavailable
from services.decoder.engine.limits import Limits
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
