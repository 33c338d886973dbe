"""How prompts are cut into chunks, and what that means for those who decode beside them."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest

from services.decoder.engine.limits import Limits
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.step_plan import Chunk, StepPlan
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

LIMITS = Limits(
    max_rows=64,
    max_model_len=2**20,
    max_step_tokens=4096,
    max_waiting=8,
    block_tokens=16,
    page_tokens=64,
)


def sequence(tokens: int, computed: int = 0, name: str = "0", answer: int = 4) -> Sequence:
    made = Sequence(name, 0, list(range(2, tokens + 2)), Sampling(), 0, answer)
    made.computed = computed
    return made


def next_length(prompt: int, computed: int, decodes: int = 0, limits: Limits = LIMITS) -> int:
    plan = StepPlan(decodes=[sequence(9, 9) for _ in range(decodes)])
    chunk = limits.next_chunk(sequence(prompt, computed), plan)
    assert chunk is None or chunk.start == computed
    return 0 if chunk is None else chunk.end - chunk.start


@pytest.mark.parametrize(
    ("prompt", "computed", "decodes", "length"),
    [
        (1, 0, 0, 1),
        (4096, 0, 0, 4096),
        (4097, 0, 0, 4096),
        (4097, 4096, 0, 1),
        (200_000, 131_072, 0, 4096),  # alone: the whole step
        (200_000, 0, 1, 1024),  # beside others: a quarter,
        (200_000, 0, 64, 1024),
        (200_000, 16_384, 1, 1024),
        (200_000, 24_576, 1, 2048),  # more with the context,
        (200_000, 32_768, 64, 2560),
        (200_000, 131_072, 1, 3072),  # and three quarters at most
        (1500, 1024, 1, 476),
    ],
)
def test_chunks_grow_with_the_context(prompt: int, computed: int, decodes: int, length: int) -> None:
    assert next_length(prompt, computed, decodes) == length


def test_a_chunk_that_does_not_end_its_prompt_ends_at_an_edge() -> None:
    """Of 512 tokens where it is that long, else of a page, else of a block."""
    for step, length in ((1000, 512), (511, 448), (64, 64), (63, 48), (16, 16), (15, 0)):
        limits = Limits(64, 2**20, step, 8, block_tokens=16, page_tokens=64)
        assert next_length(9000, 128, limits=limits) == length


def test_prompts_share_what_a_step_has_left() -> None:
    first, second = sequence(3000, name="a"), sequence(3000, name="b")
    plan = StepPlan(chunks=[Chunk(first, 0, 3000)])
    assert LIMITS.next_chunk(second, plan) == Chunk(second, 0, 1024)
    plan = StepPlan(decodes=[sequence(9, 9)], chunks=[Chunk(first, 0, 1000)])
    assert LIMITS.next_chunk(second, plan) == Chunk(second, 0, 16)
    plan.chunks.append(Chunk(second, 0, 16))
    assert LIMITS.next_chunk(sequence(50, name="c"), plan) is None


def test_every_running_row_leaves_room_for_a_block() -> None:
    """However many decode, a prompt gets on."""
    limits = Limits(64, 2**20, max_step_tokens=64 + 16, max_waiting=8, block_tokens=16, page_tokens=64)
    assert next_length(100, 0, decodes=64, limits=limits) == 16


def engine(path: Path, step_tokens: int) -> OfflineEngine:
    settings = DecoderSettings.model_validate(
        {
            "model": path,
            "dtype": "float32",
            "max_rows": 2,
            "max_step_tokens": step_tokens,
            "budget_tokens": 64,
            "window_tokens": 256,
            "max_model_len": 2048,
        }
    )
    return OfflineEngine(settings, 2**26)


def step_seconds(one: OfflineEngine, reading: Sequence) -> list[float]:
    """CPU time of each step until `reading` is prefilled."""
    one.scheduler.submit([reading])
    taken: list[float] = []
    while not taken or reading.is_prefilling:
        begun = time.process_time()
        one.step()
        taken.append(time.process_time() - begun)
    return taken


def test_a_long_prompt_does_not_stop_the_others(tmp_path: Path) -> None:
    """The running stream gets a token from every step, none longer than its chunk alone and two steps more.

    A busy machine may spoil a measurement, so the bound must hold once in five.
    """
    path = checkpoints.save(tmp_path, "llama", max_position_embeddings=2048)
    prompt = [2 + i % 50 for i in range(1800)]
    for _ in range(5):
        beside, alone = engine(path, 512), engine(path, 384)
        talking = Sequence("talking", 0, prompt[:9], Sampling(), 0, 200)
        beside.scheduler.submit([talking])
        decodes = []
        for _ in range(12):
            begun = time.process_time()
            beside.step()
            decodes.append(time.process_time() - begun)
        before = len(talking.generated)
        gaps = step_seconds(beside, Sequence("reading", 0, prompt, Sampling(), 0, 2))
        assert len(talking.generated) - before == len(gaps), "a step without a token for the stream"
        assert len(gaps) > 7
        chunks = step_seconds(alone, Sequence("reading", 0, prompt, Sampling(), 0, 2))
        if max(gaps) <= max(chunks) + 2 * statistics.median(decodes):
            return
    pytest.fail(f"a gap of {max(gaps):.4f} s; a chunk takes {max(chunks):.4f} s, a step {decodes}")
