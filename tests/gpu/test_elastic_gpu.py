"""Elastic capacity on the GPU: resizes equal the CPU's and wait for nothing; tokens are those of `full`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from benchmarks.synthetic import synthetic_model
from services.decoder.engine.assembly import dense_ops
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.counter import Counter
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.hot_class import HotClass, Resize
from services.decoder.models.causal_lm import CausalLM
from services.decoder.settings import DecoderSettings
from tests.decoder import made_up
from tests.decoder.recording import Recording

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
ROWS, MAX_BLOCKS = 6, 80
CLASSES = (
    HotClass(layers=1, parcels=6 * 20, parcel_slots=4, floor=20, most=20),
    HotClass(layers=2, parcels=90, parcel_slots=2, floor=2, most=40),
)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_resizes_equal_the_cpus_and_wait_for_nothing(no_waiting: None) -> None:
    """The same history on both; only the LRU's part between resizes is done on the CPU and copied."""
    sides = [HotBuffer(made_up.shape(), ROWS, MAX_BLOCKS, CLASSES, device) for device in (made_up.CPU, CUDA)]
    chance, free, held = random.Random(3), list(range(90)), dict[int, list[int]]()
    generator = torch.Generator().manual_seed(4)
    for step in range(300):
        row = chance.randrange(ROWS)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        if row not in held:
            held[row] = [free.pop() for _ in range(min(len(free), chance.randint(2, 6)))]
            if len(held[row]) < 2:
                free += held.pop(row)
                continue
            for side in sides:
                side.resize([Resize(0, row, list(range(row * 20, row * 20 + 20))), Resize(1, row, held[row])])
                side.seat(row, 3)
        elif chance.random() < 0.1:
            for side in sides:
                side.leave(row)
            free += held.pop(row)
        else:
            if chance.random() < 0.5 and free:
                held[row] = [*held[row], *(free.pop() for _ in range(min(len(free), chance.randint(1, 9))))][
                    :40
                ]
                free = [parcel for parcel in range(90) if all(parcel not in own for own in held.values())]
            else:
                count = chance.randint(2, len(held[row]))
                free += held[row][count:]
                held[row] = held[row][:count]
            for side in sides:
                side.resize([Resize(1, row, held[row])])
        torch.cuda.set_sync_debug_mode("default")
        for ours, theirs, pool, same in zip(
            *(side.tables for side in sides), *(side.pools for side in sides), strict=True
        ):
            assert torch.equal(ours.block_to_slot, theirs.block_to_slot.cpu()), step
            assert torch.equal(ours.capacity, theirs.capacity.cpu())
            assert torch.equal(ours.order, theirs.order.cpu()), step
            assert torch.equal(ours.slot_to_block, theirs.slot_to_block.cpu()), step
            assert torch.equal(pool, same.cpu()), step
        for side in sides:
            side.check_integrity()
        # Fill some slots with blocks, and shuffle the order, the same on both sides.
        for layer, tables in enumerate(sides[0].tables):
            for lane in range(ROWS * 3):
                slots = int(tables.capacity[lane // 3])
                if not slots:
                    continue
                places = tables.places(torch.tensor([lane]), slots)[0]
                count = min(slots, MAX_BLOCKS, 1 + step % 30)
                blocks = torch.randperm(MAX_BLOCKS, generator=generator)[:count]
                slot = torch.randperm(slots, generator=generator)[:count]
                order = torch.randperm(slots, generator=generator)
                order = torch.cat([order[order != slot[0]], slot[:1]])  # the open block's is the last
                tables.order[places] = order.int()
                tables.block_to_slot[lane] = -1
                tables.slot_to_block[places] = -1
                tables.block_to_slot[lane, blocks] = slot.int()
                tables.slot_to_block[places[slot]] = blocks.int()
            sides[0].pools[layer].normal_(generator=generator)
            other = sides[1].tables[layer]
            other.order.copy_(tables.order)
            other.block_to_slot.copy_(tables.block_to_slot)
            other.slot_to_block.copy_(tables.slot_to_block)
            sides[1].pools[layer].copy_(sides[0].pools[layer])


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> CausalLM:
    dtype: torch.dtype = request.param
    return synthetic_model("qwen3-0.6b", CUDA, dtype, 3, dense=dense_ops(CUDA))[1]


def engine(model: CausalLM, blocks: int, **changes: object) -> OfflineEngine:
    """`blocks` of each lane of all rows together."""
    spec = model.spec
    block_bytes = 4 * 2 * spec.head_dim * model.dtype.itemsize
    base: dict[str, object] = {
        "model": spec.path,
        "device": "cuda:0",
        "block_tokens": 4,
        "budget_tokens": 128,
        "hot_bytes": blocks * spec.layers * spec.kv_heads * (block_bytes + 8),
        "max_rows": 12,
        "max_model_len": 4096,
        "max_step_tokens": 2048,
        "prefix_cache": False,
    }
    return OfflineEngine(DecoderSettings.model_validate(base | changes), 3 * 2**30, model)


def requests(count: int) -> list[Sequence]:
    chance = random.Random(11)
    made = []
    for number in range(count):
        length, tokens = chance.choice([30, 500, 1500, 3000]), chance.choice([40, 120, 250])
        prompt = [chance.randrange(9000) for _ in range(length)]
        made.append(Sequence(str(number), 0, prompt, Sampling(), seed=0, max_tokens=tokens))
    return made


def test_rows_that_come_and_go_get_the_tokens_of_full_residency(model: CausalLM) -> None:
    """Graphs are captured once, before the first row; capacities change some hundred times behind them."""
    tiered, chance = engine(model, 2200), random.Random(5)
    wanted, recording = requests(30), Recording()
    recording.attach(tiered, wanted)
    waiting, owned = list(wanted), dict[int, int]()
    grown = shrunk = 0
    while waiting or tiered.scheduler.has_work:
        if waiting and chance.random() < 0.05:
            tiered.scheduler.submit([waiting.pop(0)])
        seen = len(recording.steps)
        tiered.step()
        for step in recording.steps[seen:]:
            owned = {row: count for row, count in owned.items() if row not in step.left_rows}
            for _, row, parcels in step.resizes:
                before = owned.get(row, 0)
                grown += 0 < before < len(parcels)
                shrunk += before > len(parcels)
                owned[row] = len(parcels)
    torch.cuda.synchronize()
    tiered.scheduler.check_integrity()
    tiered.runner.residence.check_integrity()
    counted = tiered.counters().sum(0).tolist()
    print(f"{model.dtype} grown={grown} shrunk={shrunk} miss_rate={counted[Counter.MISSES] / counted[0]:.3f}")
    assert grown > 20
    assert shrunk > 5
    assert counted[Counter.EVICTIONS] > 0
    full = engine(model, 0, kv_mode="full")
    same = requests(30)
    recording.replay(full.runner, same)
    for ours, theirs in zip(wanted, same, strict=True):
        assert len(ours.generated) == ours.max_tokens
        assert ours.generated == theirs.generated[: len(ours.generated)]
