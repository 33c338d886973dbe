"""An engine's sampled choices: at the size that it has, the curve says what the layers' own counters say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from services.contract.errors import SetupError
from services.decoder.engine.assembly import miss_curve
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.kv.miss_curve import CAPACITIES
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("model"), "llama", head_dim=16)


def _engine(checkpoint: Path, **changes: object) -> OfflineEngine:
    base: dict[str, object] = {
        "model": checkpoint,
        "dtype": "float32",
        "block_tokens": 4,
        "budget_tokens": 32,
        "hot_tokens": 80,
        "quest_sharing": "layer",
        "max_rows": ROWS,
        "max_model_len": 512,
        "sampled_layers": 3,
    }
    return OfflineEngine(DecoderSettings.model_validate(base | changes), 32 * 2**20)


def _serve(engine: OfflineEngine) -> None:
    chance = random.Random(3)
    prompts = [[chance.randrange(3, 200) for _ in range(length)] for length in (300, 300, 200, 60, 300)]
    engine.generate(
        [
            Sequence(str(at), 0, prompt, Sampling(), seed=at, max_tokens=60)
            for at, prompt in enumerate(prompts)
        ]
    )


def test_the_curve_passes_through_what_was_counted(checkpoint: Path) -> None:
    engine = _engine(checkpoint)
    _serve(engine)
    curve = engine.runner.residence.curve
    assert curve is not None
    assert curve.layers == {0, 1, 2}
    chosen, misses = (int(engine.counters()[:, of].sum()) for of in (Counter.CHOSEN, Counter.MISSES))
    assert curve.chosen == chosen > 0
    at_size = dict(zip(CAPACITIES, curve.misses, strict=True))
    # Rows shrink when others come, which the curve does not follow block by block.
    assert abs(at_size[1.0] - misses) <= 0.1 * misses
    assert at_size[0.5] > at_size[1.0] > at_size[4.0]


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"sampled_layers": 1}, {1}),
        ({"sampled_layers": 2}, {0, 2}),
        ({"sampled_layers": 9, "dense_layers": 1}, {1, 2}),
    ],
)
def test_layers_that_choose_are_sampled_evenly(
    checkpoint: Path, changes: dict[str, object], layers: set[int]
) -> None:
    curve = _engine(checkpoint, **changes).runner.residence.curve
    assert curve is not None
    assert curve.layers == layers


@pytest.mark.parametrize(
    "changes", [{"sampled_layers": 0}, {"kv_mode": "full", "hot_tokens": 0}, {"selector": "everything"}]
)
def test_nothing_is_sampled_where_there_is_nothing_to_ask(
    checkpoint: Path, changes: dict[str, object]
) -> None:
    engine = _engine(checkpoint, **changes)
    _serve(engine)
    assert engine.runner.residence.curve is None


def test_on_a_gpu_it_is_refused_where_it_was_asked_for(checkpoint: Path) -> None:
    gpu = torch.device("cuda:0")
    with pytest.raises(SetupError, match="--sampled-layers"):
        miss_curve(_engine(checkpoint).plan, gpu)
    plan = _engine(checkpoint).plan
    plan.settings.model_fields_set.discard("sampled_layers")
    assert miss_curve(plan, gpu) is None
