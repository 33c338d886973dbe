"""Steps ahead with a real tiny model: what an engine launches on a GPU, carried out on the CPU.

Decode rows run by DecodeGraphs and are drawn by the device's sampler, both on their CPU twins; what is
launched is done at once, as a stream would do it in this order. The tokens are those of steps that wait.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.decoder.engine import assembly, offline
from services.decoder.engine.decode_graphs import DecodeGraphs
from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.runner import Runner
from services.decoder.engine.running_step import RunningStep
from services.decoder.engine.sequence import Finish, SampledToken, Sampling, Sequence
from services.decoder.engine.step_plan import Arrival, StepPlan
from services.decoder.engine.stepper import Stepper
from services.decoder.kernels.dense import TorchDense
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints

ROWS = 4


@dataclass
class Drawn:
    """There when it has been looked at a few times."""

    tokens: list[SampledToken | None]
    looks: int

    @property
    def is_there(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def collect(self) -> list[SampledToken | None]:
        return self.tokens


@dataclass(frozen=True)
class TwinDraw:
    """DeviceDraw without copies and events; what it draws is there sooner or later."""

    sampler: DeviceSampler
    chance: random.Random

    def seat(self, sequence: Sequence) -> None:
        self.sampler.seat(sequence)

    def launch(self, logits: Tensor, sequences: list[Sequence], late: list[int]) -> Drawn:
        greedy = self.sampler.prepare(sequences, late)
        count = len(sequences)
        drawn = self.sampler.draw(logits[:count], greedy=greedy)[:count].tolist()
        tokens = [None if token < 0 else SampledToken(token) for token in drawn]
        return Drawn(tokens, self.chance.randrange(4))


@dataclass(frozen=True)
class Launcher:
    """The runner, told whether to run ahead; what was launched, by how it was planned."""

    runner: Runner
    runs_ahead: bool
    launched: Counter[str]

    def launch(self, plan: StepPlan) -> RunningStep:
        self.launched[plan.planned.value] += bool(plan.tokens)
        self.launched["chunk ahead"] += plan.ahead and bool(plan.chunks)
        self.launched["resize ahead"] += plan.ahead and bool(plan.resizes)
        if self.runner.tails is not None:
            computed = [tail.chunk for tail in self.runner.tails._ready.values()]
            self.launched["end computed beside"] += len(set(computed).intersection(plan.chunks))
        return self.runner.launch(plan)

    def arrived(self) -> list[Arrival]:
        return self.runner.arrived()

    def wait(self) -> None:
        self.runner.wait()


class Rig:
    def __init__(self, path: Path, mode: str, *, ahead: bool, beside: bool = False) -> None:
        settings = DecoderSettings.model_validate(
            {
                "model": path,
                "dtype": "float32",
                "kv_mode": mode,
                "budget_tokens": 32,
                "hot_bytes": 200_000 if mode == "tiered" else 0,
                "max_rows": ROWS,
                "max_model_len": 320,
                "max_step_tokens": 192,
                "sampled_layers": 0,
                "device_cache_tokens": 1024,
                "share_device_pages": not beside,  # else little is loaded
            }
        )
        with pytest.MonkeyPatch.context() as patch:
            for room in (offline, assembly):
                patch.setattr(room, "loads_beside", lambda device: beside)
            if beside:  # layer by layer
                patch.setattr(offline, "dense_ops", lambda device: TorchDense())
            self.engine = OfflineEngine(settings, 6 * 2**20)
        runner, device = self.engine.runner, torch.device("cpu")
        assert runner.heart is not None
        sampler = DeviceSampler(ROWS, self.engine.model.spec.vocab_size, device)
        graphs = DecodeGraphs(
            runner.model,
            runner.shape,
            runner.tables,
            runner.heart,
            sampler.tokens,
            self.engine.plan.max_blocks,
            capture=False,
            sizes=range(1, ROWS + 1),  # the twins know no padding
        )
        self.launcher = Launcher(
            replace(runner, graphs=graphs, draw=TwinDraw(sampler, random.Random(1))),
            ahead,
            launched=Counter(),
        )
        self.stepper = Stepper(self.engine.scheduler, self.launcher, nullcontext())
        self.seen: dict[Sequence, list[int]] = {}

    def submit(self, one: Sequence) -> None:
        self.engine.scheduler.submit([one])
        self.seen[one] = []

    def step(self) -> None:
        for one, tokens in self.stepper.step()[1]:
            self.seen[one] += [token.token for token in tokens]
        self.engine.scheduler.check_integrity()
        self.engine.runner.residence.check_integrity()

    def finish(self) -> None:
        for _ in range(2000):
            if not self.stepper.has_work:
                break
            self.step()
        assert not self.stepper.has_work
        assert self.engine.host.lent == 0


WISHES = (
    Sampling(),
    Sampling(temperature=0.9, top_p=0.9),
    Sampling(temperature=0.7, top_k=20, frequency_penalty=0.5, presence_penalty=0.3),
    Sampling(repetition_penalty=1.3, logit_bias=((9, 2.0),)),
)


def requests(seed: int, *, alike: bool) -> list[tuple[int, Sequence]]:
    """(Steps after it, request): short and long, some or, if `alike`, most begin alike; two choices, ends
    foreseen and not.
    """
    chance = random.Random(seed)
    common = [chance.randrange(200) for _ in range(320)]
    asked: list[tuple[int, Sequence]] = []
    for number in range(10):
        length = chance.choice([130, 200, 260] if alike else [3, 40, 130, 200, 260])
        shared = length * (number % 3 == 0) if not alike else (length - 5) * (number % 4 != 1)
        prompt = common[:shared] + [chance.randrange(200) for _ in range(length - shared)]
        one = Sequence(
            str(number // 2) if number > 5 else f"alone{number}",
            number % 2,
            prompt if number != 7 else list(asked[-1][1].prompt),
            WISHES[number % len(WISHES)],
            seed=number,
            max_tokens=chance.choice([1, 9, 40, 55]),
            min_tokens=chance.choice([0, 4]),
            stop_ids=frozenset(chance.sample(range(200), chance.choice([0, 12]))),
            priority=chance.choice([0, 0, 0, 1]),
        )
        asked.append((chance.choice([0, 1, 2, 5, 12]), one))
    return asked


@pytest.mark.parametrize(
    ("mode", "beside", "seeds"),
    [
        ("tiered", False, range(2)),
        ("full", True, range(1)),
        pytest.param("tiered", False, range(2, 12), marks=pytest.mark.slow),
        pytest.param("tiered", True, range(2, 8), marks=pytest.mark.slow),
        pytest.param("full", False, range(1, 8), marks=pytest.mark.slow),
        pytest.param("full", True, range(1, 12), marks=pytest.mark.slow),
    ],
    ids=["tiered", "full beside", "tiered, more", "tiered beside", "full", "full beside, more"],
)
def test_the_tokens_are_those_of_steps_that_wait(
    tmp_path: Path, mode: str, beside: bool, seeds: range
) -> None:
    """`beside`, a newcomer's pages are loaded and the end of its prompt is computed while others go on."""
    path = checkpoints.save(tmp_path, "llama")
    launched: Counter[str] = Counter()
    for seed in seeds:
        answers = []
        for ahead in (False, True):
            rig = Rig(path, mode, ahead=ahead, beside=ahead and beside)
            chance, asked = random.Random(seed), requests(seed, alike=beside)
            for pause, one in asked:
                rig.submit(one)
                for _ in range(pause):
                    rig.step()
                if chance.random() < 0.2:
                    rig.engine.scheduler.abort(chance.choice(asked)[1].request_id, set())
            rig.finish()
            answers.append([(one.finish, rig.seen[one]) for _, one in asked])
        launched += rig.launcher.launched
        for (ended, tokens), (end, early) in zip(*answers, strict=True):
            shorter = min(len(tokens), len(early))
            assert tokens[:shorter] == early[:shorter]
            assert Finish.ABORT in (ended, end) or (ended, tokens) == (end, early)
    assert launched["ahead"] > 3 * launched["idle"]
    assert launched["chunk ahead"] > 10
    assert launched["end computed beside"] >= (len(seeds) if beside else 0)
    if mode == "tiered":
        assert launched["resize ahead"] > 5
