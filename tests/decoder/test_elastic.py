"""Rows come, grow, shrink and leave at random over a small pool; the tokens are those of full residency."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints
from tests.decoder.recording import Recording

pytestmark = pytest.mark.usefixtures("one_thread")

ARENA_BYTES = 32 * 2**20
BLOCK_BYTES = 4 * 2 * 16 * 4  # of the tiny model: 4 tokens, a key and a value, 16 float32 each
LANES = 3 * 2  # layers x groups: what a block of a row costs that many times
ROWS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("model"), "llama", head_dim=16)


def engine(checkpoint: Path, blocks: int, **changes: object) -> OfflineEngine:
    """`blocks` of each lane of all rows together."""
    base: dict[str, object] = {
        "model": checkpoint,
        "dtype": "float32",
        "block_tokens": 4,
        "budget_tokens": 32,
        "hot_bytes": blocks * LANES * (BLOCK_BYTES + 8),
        "max_rows": ROWS,
        "max_model_len": 448,
        "max_step_tokens": 128,
        "prefix_cache": False,
    }
    return OfflineEngine(DecoderSettings.model_validate(base | changes), ARENA_BYTES)


def sequences(count: int, seed: int) -> list[Sequence]:
    """Of the same lengths and prompts for the same seed."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [chance.randrange(3, 200) for _ in range(chance.choice([5, 40, 150, 300]))]
        tokens = chance.choice([8, 40, 90])
        made.append(Sequence(str(number), 0, prompt, Sampling(), seed=number, max_tokens=tokens))
    return made


def check(ours: OfflineEngine) -> None:
    ours.scheduler.check_integrity()
    ours.runner.residence.check_integrity()


@pytest.mark.parametrize(("blocks", "dense"), [(100, 0), (300, 0), (500, 1)])
@pytest.mark.parametrize("sharing", ["kv_head", "layer"])
def test_tokens_are_those_of_full_residency(checkpoint: Path, blocks: int, dense: int, sharing: str) -> None:
    tiered = engine(checkpoint, blocks, dense_layers=dense, quest_sharing=sharing)
    wanted, chance = sequences(24, seed=blocks), random.Random(blocks)
    recording = Recording()
    recording.attach(tiered, wanted)
    waiting = list(wanted)
    owned: dict[tuple[int, int], int] = {}
    grown = shrunk = 0
    while waiting or tiered.scheduler.has_work:
        if waiting and chance.random() < 0.15:
            tiered.scheduler.submit([waiting.pop(0)])
        elif tiered.scheduler.running and chance.random() < 0.01:
            victim = chance.choice(tiered.scheduler.running)
            tiered.scheduler.abort(victim.request_id, set())
        tiered.step()
        for number, row, parcels in recording.steps[-1].resizes:
            before = owned.get((number, row), 0)
            grown += 0 < before < len(parcels)
            shrunk += before > len(parcels)
            owned[number, row] = len(parcels)
        for row in recording.steps[-1].left_rows:
            owned = {key: count for key, count in owned.items() if key[1] != row}
        check(tiered)
    counted = tiered.counters().sum(0)
    assert grown > 10
    assert shrunk > (5 if blocks < 500 else 0)
    assert counted[Counter.EVICTIONS] > 0 or blocks > 100
    assert counted[Counter.MISSES] > 0
    assert tiered.runner.residence.hot_slots().used == 0

    full = engine(checkpoint, 0, kv_mode="full", dense_layers=dense, quest_sharing=sharing)
    same = sequences(24, seed=blocks)
    recording.replay(full.runner, same)
    for ours, theirs in zip(wanted, same, strict=True):
        assert ours.generated == theirs.generated[: len(ours.generated)]
        assert len(ours.generated) == ours.max_tokens or ours.finish is not None


def test_alone_everything_stays_and_with_others_each_has_its_floor(checkpoint: Path) -> None:
    """A block is fetched once at most while its row is alone; then others come, and it shrinks."""
    ours = engine(checkpoint, 110)
    long = Sequence("long", 0, [3 + i % 190 for i in range(300)], Sampling(), 1, max_tokens=120)
    ours.scheduler.submit([long])
    while len(long.generated) < 60:
        ours.step()
    alone = ours.counters().sum(0).tolist()
    assert alone[Counter.EVICTIONS] == 0
    assert alone[Counter.MISSES] <= LANES * (360 // 4)
    capacities = ours.runner.residence.hot_slots()
    others = [Sequence(str(i), 0, [5 + i] * 300, Sampling(), 1, max_tokens=100) for i in range(7)]
    ours.scheduler.submit(others)
    ours.scheduler.submit([Sequence("more", 0, [9] * 8, Sampling(), 1, max_tokens=4)])
    while len(long.generated) < 119:
        ours.step()
        check(ours)
    assert int(ours.counters()[:, Counter.EVICTIONS].sum()) > 0
    assert ours.runner.residence.hot_slots().used > capacities.used
    while ours.scheduler.has_work:
        ours.step()
    check(ours)


def test_many_rows_on_a_pool_of_two_floors_are_all_served(checkpoint: Path) -> None:
    ours = engine(checkpoint, 2 * 9, max_waiting=64)
    wanted = sequences(10, seed=4)
    most = 0
    for sequence in wanted:
        ours.scheduler.submit([sequence])
    while ours.scheduler.has_work:
        ours.step()
        most = max(most, len(ours.scheduler.running))
        check(ours)
    assert all(len(sequence.generated) == sequence.max_tokens for sequence in wanted)
    assert 2 <= most < ROWS, "rows that no floor was left for were seated all the same"
    alone = engine(checkpoint, 500, max_rows=1)
    for number, sequence in enumerate(sequences(10, seed=4)):
        alone.generate([sequence])
        assert sequence.generated == wanted[number].generated
