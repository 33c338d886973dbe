"""Steps ahead on the GPU: the tokens of steps that wait, however far the device lags; no launch waits."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.synthetic import synthetic_model
from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.runner import Runner
from services.decoder.engine.running_step import RunningStep
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.step_plan import Arrival, StepPlan
from services.decoder.engine.stepper import Stepper
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings
from tests.gpu.test_step_gpu import no_synchronisation

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
ROWS = 4
LAG_CYCLES = 20_000_000  # about 10 ms: the host is through with a step's launches long before
WISHES = (
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, top_k=50),
    # Among few: in the flat tail of a random model a token is as wide as what another batch rounds otherwise.
    Sampling(temperature=0.8, top_k=50, frequency_penalty=0.4, repetition_penalty=1.2),
)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return synthetic_model("qwen3-0.6b", CUDA, torch.float32, 3, dense=dense_ops(CUDA))[1]


def engine(model: CausalLM, mode: str) -> OfflineEngine:
    """Rows of up to 64 blocks share slots for 100, so they are resized all the time."""
    settings = DecoderSettings.model_validate(
        {
            "model": Path("synthetic"),
            "device": "cuda:0",
            "kv_mode": mode,
            "budget_tokens": 64,
            "hot_bytes": 100 * 3 * 8 * (16 * 2 * 128 * 4 + 8),
            "max_rows": ROWS,
            "max_model_len": 1024,
            "max_step_tokens": 512,
        }
    )
    return OfflineEngine(settings, 2**28, model)


@dataclass(frozen=True)
class Launcher:
    """The runner, told whether to run ahead; the stream lags behind each launch."""

    runner: Runner
    runs_ahead: bool
    launched: Counter[str]

    def launch(self, plan: StepPlan) -> RunningStep:
        self.launched[plan.planned.value] += bool(plan.tokens)
        self.launched["chunk ahead"] += plan.ahead and bool(plan.chunks)
        self.launched["resize ahead"] += plan.ahead and bool(plan.resizes)
        torch.cuda._sleep(LAG_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self.runner.launch(plan)

    def arrived(self) -> list[Arrival]:
        return self.runner.arrived()

    def wait(self) -> None:
        self.runner.wait()


def requests() -> list[tuple[int, Sequence]]:
    """(Steps after it, request): rows come and go, at ends that are foreseen and others; some begin alike."""
    chance = random.Random(11)
    common = [chance.randrange(9000) for _ in range(1024)]
    asked = []
    for number in range(14):
        length = chance.choice([5, 130, 400, 700])
        prompt = common[:length] if number % 3 == 0 else [chance.randrange(9000) for _ in range(length)]
        stops = frozenset(chance.sample(range(9000), chance.choice([0, 500])))
        tokens = chance.choice([1, 20, 90, 150])
        one = Sequence(str(number), 0, prompt, WISHES[number % 3], number, tokens, 0, stops)
        asked.append((chance.choice([0, 1, 3, 10]), one))
    return asked


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_the_tokens_are_those_of_steps_that_wait(model: CausalLM, mode: str) -> None:
    answers, launched = [], Counter[str]()
    for ahead in (False, True):
        one = engine(model, mode)
        stepper = Stepper(one.scheduler, Launcher(one.runner, ahead, launched), nullcontext())
        asked = requests()
        for pause, sequence in asked:
            one.scheduler.submit([sequence])
            for _ in range(pause):
                stepper.step()
        while stepper.has_work:
            stepper.step()
            one.scheduler.check_integrity()
        one.runner.residence.check_integrity()
        answers.append([(sequence.finish, sequence.generated) for _, sequence in asked])
    assert answers[0] == answers[1]
    assert launched["chunk ahead"] > 20
    if mode == "tiered":
        assert launched["resize ahead"] > 5


@pytest.mark.parametrize("mode", ["tiered", "full"])
def test_a_step_with_chunks_waits_for_nothing(model: CausalLM, mode: str) -> None:
    """A prompt of many chunks, found in part, and another behind it, beside a row that decodes."""
    one, chance = engine(model, mode), random.Random(3)
    prompt = [chance.randrange(9000) for _ in range(900)]
    one.scheduler.submit([Sequence("talks", 0, prompt[:40], Sampling(), 1, 400)])
    warm = Sequence("warm", 0, list(prompt[:700]), Sampling(), 1, 3)
    one.scheduler.submit([warm])
    while not warm.finish:
        one.step()
    one.step()
    new = [
        Sequence(name, 0, list(text), Sampling(), 1, 20) for name, text in (("a", prompt), ("b", prompt[1:]))
    ]
    for sequence in new:
        one.scheduler.submit([sequence])
    with no_synchronisation():
        while not all(sequence.finish for sequence in new):
            one.step()
    assert new[0].cached
