"""The device's sampler, here its twin on the CPU: sampler.py's tokens, whoever shares the batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from services.contract.errors import InvalidRequest
from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.sampler import sample
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.gpu import sample as gpu_sample
from services.decoder.kernels.gpu.card import Card
from services.decoder.kernels.sample_limits import MOST_BARRED, MOST_BIASED
from tests.engine.sampling_cases import Kind, check_history, defined, drawn

CPU = torch.device("cpu")


def seated(sampler: DeviceSampler, *sequences: Sequence) -> None:
    for row, sequence in enumerate(sequences):
        sequence.row = row
        sampler.seat(sequence)


@dataclass(frozen=True)
class Case:
    kind: Kind
    vocab: int
    rows: int
    steps: int


CASES = [
    Case("normal", 1000, 12, 60),
    Case("ties", 257, 12, 60),
    Case("peaked", 64, 12, 60),
    Case("wild", 5000, 6, 40),
    Case("broken", 100, 12, 60),
    Case("normal", 1, 3, 5),
    Case("ties", 2, 5, 40),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_the_definition(case: Case) -> None:
    """Through histories: rows come and go, batches are shuffled, answers are replayed."""
    sampler = DeviceSampler(case.rows, case.vocab, CPU)
    tally = check_history(sampler, case.kind, case.vocab, case.rows, case.steps)
    assert tally.checked > case.steps
    assert tally.differing == 0


def test_a_rewound_sequence_is_replayed_with_the_same_counts() -> None:
    """Preempted after 20 tokens and seated anew elsewhere, it draws on as if nothing had been."""
    wish = Sampling(temperature=1.0, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2)
    rows = torch.randn(40, 50, generator=torch.Generator().manual_seed(4)) * 2

    def run(sampler: DeviceSampler, sequence: Sequence, end: int) -> None:
        while len(sequence.generated) < end:
            [token] = drawn(sampler, rows[len(sequence.generated)].unsqueeze(0), [sequence])
            sequence.take(token)

    def fresh() -> Sequence:
        return Sequence("r", 0, [1, 2, 2], wish, seed=7, max_tokens=100)

    whole, parted = fresh(), fresh()
    sampler = DeviceSampler(2, 50, CPU)
    seated(sampler, whole)
    run(sampler, whole, 40)
    seated(sampler, parted)
    run(sampler, parted, 20)
    parted.rewind()
    parted.row = 1
    sampler.seat(parted)
    run(sampler, parted, 40)
    assert parted.generated == whole.generated


def test_a_sequence_may_be_seated_with_tokens_it_has_already() -> None:
    wish = Sampling(frequency_penalty=1.0)
    row = torch.tensor([[5.0, 4.5, 4.0, 0.0]])
    sequence = Sequence("r", 0, [3], wish, seed=0, max_tokens=100, generated=[0, 0, 1])
    sampler = DeviceSampler(1, 4, CPU)
    seated(sampler, sequence)
    assert drawn(sampler, row, [sequence]) == defined(row, [sequence]) == [2]


def test_a_row_forgets_who_sat_in_it() -> None:
    """Bias, stop tokens, penalties and counts of the last one must not reach the next."""
    sampler = DeviceSampler(1, 4, CPU)
    wish = Sampling(logit_bias=((3, 9.0),), presence_penalty=2.0)
    first = Sequence("r", 0, [0], wish, 0, max_tokens=9, min_tokens=9, stop_ids=frozenset({1}))
    seated(sampler, first)
    row = torch.tensor([[1.0, 2.0, 0.0, 1.5]])
    assert drawn(sampler, row, [first]) == [3]
    second = Sequence("s", 0, [0], Sampling(), 0, max_tokens=9)
    seated(sampler, second)
    assert drawn(sampler, row, [second]) == [1]
    third = Sequence("t", 0, [0], Sampling(presence_penalty=0.6), 0, max_tokens=9)
    seated(sampler, third)
    assert drawn(sampler, row, [third]) == [1]


def test_when_the_likeliest_token_is_everyones_answer() -> None:
    """What `prepare` says decides which kernel runs: a wrong yes would be a wrong token."""
    sampler = DeviceSampler(2, 8, CPU)
    stop = frozenset({5})

    def greedy(wish: Sampling, known: list[int], least: int) -> bool:
        plain = Sequence("p", 0, [0], Sampling(), 0, max_tokens=9)
        other = Sequence("o", 0, [0], wish, 0, max_tokens=9, min_tokens=least, stop_ids=stop, known=known)
        seated(sampler, plain, other)
        return sampler.prepare([plain, other])

    assert greedy(Sampling(), [], 0)
    assert greedy(Sampling(temperature=1.0), [3], 4), "it is known what comes"
    assert not greedy(Sampling(temperature=1.0), [], 0)
    assert not greedy(Sampling(), [], 1), "a stop token is barred"
    assert not greedy(Sampling(presence_penalty=1.0), [3], 0), "the known token must be counted"
    assert not greedy(Sampling(logit_bias=((1, 1.0),)), [], 0)


def test_padding_rows_stay_as_they_are() -> None:
    sampler = DeviceSampler(4, 8, CPU)
    sampler.tokens.fill_(-7)
    one = Sequence("r", 0, [0], Sampling(temperature=1.0), 0, max_tokens=9)
    seated(sampler, one)
    tokens = sampler.draw(torch.randn(3, 8), greedy=sampler.prepare([one]))
    assert tokens.shape == (3,)
    assert tokens[0] >= 0
    assert tokens[1:].tolist() == [-7, -7]


def test_where_no_distribution_is_left_the_greatest_is_taken() -> None:
    """A bias beyond float32's 3.4e38, and stop tokens that bar the whole vocabulary."""
    sampler = DeviceSampler(2, 4, CPU)
    wish = Sampling(temperature=1.0, logit_bias=((2, 3e38),))
    infinite = Sequence("r", 0, [0], wish, 0, max_tokens=9)
    warm, every = Sampling(temperature=1.0), frozenset(range(4))
    nothing = Sequence("r", 0, [0], warm, 0, max_tokens=9, min_tokens=1, stop_ids=every)
    seated(sampler, infinite, nothing)
    logits = torch.tensor([[0.0, 1.0, 2e38, 0.0], [0.0, 1.0, 2.0, 0.0]])
    for seed in range(20):
        infinite.seed = nothing.seed = seed
        seated(sampler, infinite, nothing)
        assert drawn(sampler, logits, [infinite, nothing]) == [2, 0]


def test_scaled_logits_in_the_models_dtype() -> None:
    """The factor is applied in float32, as the model's own logits() does it."""
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(8)).bfloat16()
    sampler = DeviceSampler(5, 300, CPU, logits_scale=1 / 3)
    rows = [Sequence("r", i, [0], Sampling(temperature=0.8, top_p=0.7), i, max_tokens=9) for i in range(5)]
    seated(sampler, *rows)
    assert drawn(sampler, logits, rows) == defined(logits.float() * (1 / 3), rows)


def test_log_probabilities_are_the_definitions() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(9))
    wish = Sampling(temperature=0.7, logprobs=True, top_logprobs=5)
    rows = [Sequence("r", i, [0], wish, i, max_tokens=9) for i in range(3)]
    sampler = DeviceSampler(3, 40, CPU)
    seated(sampler, *rows)
    tokens = sampler.draw(logits, greedy=sampler.prepare(rows))
    chosen, values, ids = sampler.logprobs(logits, tokens, 5)
    for i, expected in enumerate(sample(logits, rows)):
        assert expected is not None
        assert tokens[i] == expected.token
        assert float(chosen[i]) == expected.logprob
        assert list(zip(ids[i].tolist(), values[i].tolist(), strict=True)) == list(expected.top)


@pytest.mark.parametrize(
    ("wish", "stop", "named"),
    [
        (Sampling(logit_bias=tuple((i, 1.0) for i in range(MOST_BIASED + 1))), 0, "logit_bias names 4097"),
        (Sampling(logit_bias=((3, 1.0), (3, 2.0))), 0, "twice"),
        (Sampling(), MOST_BARRED + 1, "513 stop tokens"),
    ],
    ids=["bias", "twice", "stop"],
)
def test_what_the_tables_cannot_hold_is_refused(wish: Sampling, stop: int, named: str) -> None:
    stop_ids = frozenset(range(stop))
    with pytest.raises(InvalidRequest, match=named):
        DeviceSampler.check(wish, stop_ids)
    sampler = DeviceSampler(1, 5000, CPU)
    full = Sequence("r", 0, [0], wish, 0, max_tokens=9, min_tokens=1, stop_ids=stop_ids)
    with pytest.raises(InvalidRequest, match=named):
        seated(sampler, full)


def test_full_lists_fit() -> None:
    vocab = MOST_BIASED + MOST_BARRED + 1
    sampler = DeviceSampler(1, vocab, CPU)
    wish = Sampling(logit_bias=tuple((i, 2.0) for i in range(MOST_BIASED)))
    stop = frozenset(range(MOST_BARRED))
    one = Sequence("r", 0, [0], wish, 0, max_tokens=9, min_tokens=1, stop_ids=stop)
    seated(sampler, one)
    assert drawn(sampler, torch.zeros(1, vocab), [one]) == [MOST_BARRED]


def test_device_bytes_are_those_of_the_tables() -> None:
    tables = DeviceSampler(3, 77, CPU).tables
    held = [tables.wishes, tables.seeds, tables.counts, tables.bias_ids, tables.biases, tables.stop_ids]
    assert DeviceSampler.device_bytes(3, 77) == sum(t.numel() * t.element_size() for t in held)


def test_a_kernel_is_loaded_once_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading waits for every stream of the device; here a GPU is imitated."""
    loaded: list[tuple[int, int]] = []
    launched: list[int] = []

    class Loaded:
        def __init__(self, name: str, defines: dict[str, int], *, cluster: int, **rest: object) -> None:
            self.cluster = cluster
            loaded.append((cluster, defines["GREEDY"]))

        def most_clusters(self) -> int:
            return 132 // self.cluster

        def launch(self, blocks: int, parameters: object) -> None:
            launched.append(blocks // self.cluster)

    monkeypatch.setattr(gpu_sample, "Kernel", Loaded)
    monkeypatch.setattr(Card, "current", lambda: Card("NVIDIA H200", 9, 132, 227 * 1024))
    sampler = DeviceSampler(64, 1000, CPU)
    monkeypatch.setattr(sampler, "_on_gpu", True)
    for rows in (64, 8, *range(1, 65)):
        for greedy in (True, False):
            sampler.draw(torch.zeros(rows, 1000), greedy=greedy)
    assert len(launched) == 2 * 66
    assert len(loaded) == len(set(loaded)) == 2 * 3, "clusters of 8, 4 and 2"
