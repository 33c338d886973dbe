"""An abort at any stage, of one choice or of all: rows, slots and pages come back."""

from __future__ import annotations

import pytest

from services.decoder.engine.sequence import Finish
from tests.engine.scheduler_rig import Rig, check_answer, sequence


@pytest.mark.parametrize(
    "stage", ["queued", "prefill", "decode", "parked", "released", "finished", "unknown"]
)
def test_an_abort_at_every_stage_brings_everything_back(stage: str) -> None:
    host = 9 if stage == "released" else 20
    rig = Rig.make(max_rows=1, host=host, device=9, max_step_tokens=10, shares=True, max_model_len=72)
    one = sequence(30, 20, name="one", priority=1)
    other = sequence(40, 30, name="other")
    rig.submit(one)
    if stage in ("decode", "parked", "released"):
        rig.step_until(lambda: len(one.generated) == 3)
    if stage == "prefill":
        rig.step_until(lambda: one.computed)
    if stage in ("parked", "released"):
        rig.submit(other)
        rig.step()
        assert one.is_parked == (stage == "parked") or stage == "released"
    if stage == "released":
        rig.step_until(lambda: rig.scheduler.releases)
    if stage == "finished":
        rig.finish()
    ended = rig.abort("unknown" if stage == "unknown" else "one")
    assert ended == ([] if stage in ("finished", "unknown") else [one])
    assert rig.abort("unknown" if stage == "unknown" else "one") == [], "twice"
    rig.finish()
    assert one.finish is (Finish.LENGTH if stage in ("finished", "unknown") else Finish.ABORT)
    if other in rig.seen:
        check_answer(rig, other)


def test_choices_are_ended_together_wherever_they_are() -> None:
    rig = Rig.make(max_rows=2, host=20, device=20, shares=True, max_waiting=9)
    choices = [sequence(20, 20, choice=i, common=20, seed=i, priority=1) for i in range(4)]
    rig.submit(*choices)
    rig.step_until(lambda: choices[1].generated)
    rig.submit(sequence(5, 30, name="urgent"))
    rig.step()
    assert [one.is_parked for one in choices] == [False, True, False, False]
    assert set(rig.abort("r")) == set(choices)
    assert {one.finish for one in choices} == {Finish.ABORT}
    rig.finish()
