"""sample.cu against sampler.py, token for token, over random histories; in a graph, padded, and alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.gpu.sample import SampleShape
from tests.engine.sampling_cases import Kind, check_history, defined, drawn, logits_of

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
MOST_DIFFERING = 1e-4  # share of draws that fall within the rounding of a border; none was seen


@dataclass(frozen=True)
class Case:
    kind: Kind
    vocab: int
    rows: int
    steps: int
    dtype: torch.dtype = torch.float32
    cluster: int = 0  # 0 = what fits
    in_shared: bool = True


CASES = [
    Case("normal", 151_936, 12, 5),
    Case("ties", 151_936, 12, 5, torch.bfloat16),
    Case("normal", 262_144, 10, 3, torch.bfloat16),
    Case("ties", 50_257, 8, 4),
    Case("normal", 50_257, 8, 4, torch.float16),
    Case("wild", 49_152, 40, 2),
    Case("peaked", 128_256, 12, 4, torch.bfloat16),
    Case("normal", 1000, 200, 30),
    Case("ties", 999, 150, 30, torch.bfloat16),
    Case("wild", 3000, 100, 15),
    Case("broken", 264, 150, 30),
    Case("broken", 77, 150, 30, torch.float16),
    Case("ties", 64, 150, 40, cluster=8),
    Case("normal", 5000, 60, 20, cluster=4),
    Case("wild", 1001, 60, 20, torch.bfloat16, cluster=2),
    Case("peaked", 20_000, 60, 10, cluster=1),
    Case("normal", 30_001, 30, 8, cluster=1, in_shared=False),
    Case("ties", 100_000, 10, 4, torch.bfloat16, cluster=1, in_shared=False),
    Case("normal", 1, 3, 5),
    Case("ties", 2, 5, 20),
]


def force(patch: pytest.MonkeyPatch, cluster: int, in_shared: bool) -> None:
    def only(vocab: int, dtype: torch.dtype, *, greedy: bool) -> tuple[SampleShape, ...]:
        return (SampleShape(vocab, dtype, greedy, cluster, in_shared),)

    patch.setattr(SampleShape, "variants", only)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if case.cluster:
        force(monkeypatch, case.cluster, case.in_shared)
    sampler = DeviceSampler(case.rows + 2, case.vocab, GPU)
    tally = check_history(sampler, case.kind, case.vocab, case.rows, case.steps, case.dtype, padding=2)
    print(f"{case}: {tally.differing} of {tally.checked} tokens differ")
    assert tally.checked > case.steps
    assert tally.differing <= tally.checked * MOST_DIFFERING


WISHES = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9, top_k=50, repetition_penalty=1.1, frequency_penalty=0.2),
    Sampling(temperature=1.3, top_p=0.7),
    Sampling(temperature=1.0, min_p=0.01),
    Sampling(frequency_penalty=0.5),
    Sampling(),
)


def seated(sampler: DeviceSampler, count: int, wishes: tuple[Sampling, ...] = WISHES) -> list[Sequence]:
    rows = [
        Sequence("r", i, [i, 3], wishes[i % len(wishes)], seed=i, max_tokens=10_000) for i in range(count)
    ]
    for i, sequence in enumerate(rows):
        sequence.row = count - 1 - i
        sampler.seat(sequence)
    return rows


@pytest.mark.parametrize("greedy", [False, True])
def test_a_captured_draw_reads_what_is_there_when_it_is_replayed(greedy: bool) -> None:
    """And counts what it drew, step after step, without allocating or waiting."""
    size, vocab, most = 5, 40_000, 8
    wishes = (Sampling(),) if greedy else WISHES
    sampler = DeviceSampler(most, vocab, GPU)
    rows = seated(sampler, size, wishes)
    logits = torch.zeros(most, vocab, device=GPU)
    sampler.prepare([])
    sampler.draw(logits, greedy=greedy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sampler.draw(logits, greedy=greedy)
    steps = [logits_of("ties", most, vocab, step) for step in range(12)]
    on_device = [step.to(GPU) for step in steps]
    torch.cuda.synchronize()
    for step, theirs in zip(steps, on_device, strict=True):
        held = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        logits.copy_(theirs)
        prepared = sampler.prepare(rows)
        graph.replay()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
        assert prepared == greedy
        found = tokens.tolist()
        assert found[:size] == defined(step[:size], rows)
        assert found[size:] == [-1] * (most - size), "padding rows were written"
        for sequence, token in zip(rows, found, strict=False):
            sequence.take(token)


def test_a_rows_token_depends_on_nobody_else() -> None:
    """In a batch of 1 and of 40, in another place, beside other wishes; and every launch gives the same."""
    vocab = 151_936
    logits = logits_of("ties", 40, vocab, 1)
    alone = []
    for i in range(40):
        sampler = DeviceSampler(1, vocab, GPU)
        [one] = seated(sampler, 1, (WISHES[i % len(WISHES)],))
        one.seed = i
        sampler.seat(one)
        alone += drawn(sampler, logits[i : i + 1].to(GPU), [one])
    sampler = DeviceSampler(40, vocab, GPU)
    rows = [
        Sequence("r", i, [0, 3], WISHES[i % len(WISHES)], seed=i, max_tokens=10, row=i) for i in range(40)
    ]
    on_device = logits.to(GPU)
    for _ in range(20):
        for sequence in rows:
            sampler.seat(sequence)
        assert drawn(sampler, on_device, rows) == alone
    backwards = DeviceSampler(40, vocab, GPU)
    for sequence in rows:
        backwards.seat(sequence)
    assert drawn(backwards, on_device.flip(0), rows[::-1]) == alone[::-1]


def test_logits_that_lie_apart_and_a_scale() -> None:
    """As the columns of a wider head's output."""
    vocab, wide = 1000, 1024
    whole = torch.randn(6, wide, generator=torch.Generator().manual_seed(5)).bfloat16()
    sampler = DeviceSampler(6, vocab, GPU, logits_scale=0.3)
    rows = seated(sampler, 6)
    part: Tensor = whole.to(GPU)[:, :vocab]
    assert drawn(sampler, part, rows) == defined(whole[:, :vocab].float() * 0.3, rows)


@pytest.mark.parametrize(
    ("logits", "named"),
    [
        (partial(torch.zeros, 2, 8), r"logits must be \[rows, 16\]"),
        (partial(torch.zeros, 2, 16, dtype=torch.float64), "logits must be"),
        (lambda: torch.zeros(16, 2).t(), "contiguous within a row"),
        (lambda: torch.zeros(2, 18, device=GPU)[:, :16], "aligned to 16 bytes"),
    ],
    ids=["vocab", "dtype", "transposed", "unaligned"],
)
def test_what_the_kernel_would_read_wrongly_is_refused(logits: partial[Tensor], named: str) -> None:
    sampler = DeviceSampler(2, 16, GPU)
    rows = seated(sampler, 2)
    with pytest.raises(ValueError, match=named):
        drawn(sampler, logits().to(GPU), rows)
