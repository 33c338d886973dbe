"""A step that cannot be launched: what was computed before it counts, and nothing of it is left under way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.contract.errors import SetupError
from services.decoder.engine.runner import Runner
from services.decoder.engine.sequence import Finish, Sampling, Sequence
from services.decoder.engine.step_plan import StepPlan
from services.decoder.engine.stepper import StepFailed
from tests.engine.fake_runner import UnderWay, answer
from tests.engine.scheduler_rig import Rig


def ask(name: str, tokens: int, stop: frozenset[int] = frozenset()) -> Sequence:
    return Sequence(name, 0, [5, 6, 7], Sampling(), seed=3, max_tokens=tokens, stop_ids=stop)


def test_a_failed_step_ahead_costs_nothing_that_was_computed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends with the tokens which the step before it draws ends well; only the other is failed."""
    said = answer([5, 6, 7], 3, 9, frozenset(), 0)
    at = next(i for i in range(2, 9) if said[i] not in said[:i])
    rig = Rig.make(ahead=True)
    ends, goes_on = ask("ends", 30, frozenset({said[at]})), ask("goes on", 30)
    rig.submit(ends, goes_on)
    while len(ends.generated) < at:
        rig.step()
    launch = rig.runner.launch

    def out_of_memory(plan: StepPlan) -> UnderWay:
        if plan.ahead:
            raise RuntimeError("CUDA out of memory")
        return launch(plan)

    monkeypatch.setattr(rig.runner, "launch", out_of_memory)
    rig.step()
    assert ends.finish is Finish.STOP
    assert ends.generated == said[: at + 1]
    assert goes_on.generated == said[: at + 1]
    assert rig.stepper.has_work
    with pytest.raises(StepFailed) as failed:
        rig.stepper.step()
    assert goes_on in failed.value.plan.sequences
    rig.scheduler.fail(goes_on, "the engine failed in a step")
    while rig.stepper.has_work:
        rig.stepper.step()
    rig.scheduler.check_integrity()
    assert rig.host.lent == 0


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), SetupError("NVRTC"), ValueError("a shape")])
def test_whatever_stops_a_launch_leaves_nothing_under_way(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Its pages are given to somebody else at once."""
    waited: list[str] = []

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(Runner, "_launch", fails)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    nothing: Any = SimpleNamespace(
        host_pages=SimpleNamespace(device="cuda:0", is_cuda=True),
        load=lambda loads: None,
        abandon=lambda: None,
    )
    runner = Runner(nothing, nothing, nothing, nothing, None, nothing, nothing, graphs=nothing)
    with pytest.raises(type(error)):
        runner.launch(StepPlan(decodes=[ask("one", 3)]))
    assert waited == ["cuda:0"]
