"""The sampler against plain numpy: which token for which uniform number, and whose numbers they are."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from services.decoder.engine.sampler import sample, score_prompt
from services.decoder.engine.sequence import SampledToken, Sampling, Sequence

Floats = npt.NDArray[np.float64]


def sequence(
    sampling: Sampling,
    *,
    seed: int = 0,
    prompt: list[int] | None = None,
    generated: list[int] | None = None,
    least: int = 0,
    stop: frozenset[int] = frozenset(),
    known: list[int] | None = None,
) -> Sequence:
    return Sequence(
        "r",
        0,
        prompt or [0],
        sampling,
        seed=seed,
        max_tokens=1000,
        min_tokens=least,
        stop_ids=stop,
        known=known or [],
        generated=generated or [],
    )


def one(logits: Tensor, which: Sequence) -> SampledToken:
    [token] = sample(logits.unsqueeze(0), [which])
    assert token is not None
    return token


def reference(logits: Floats, sampling: Sampling) -> Floats:
    """Probability of each token, by the definitions: temperature, then top-k, top-p, min-p."""
    scaled = logits / sampling.temperature
    weight = np.exp(scaled - scaled.max())
    order = sorted(range(len(weight)), key=lambda token: (-weight[token], token))
    kept = order[: sampling.top_k] if sampling.top_k else order
    total = sum(weight[token] for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if mass / total < sampling.top_p:
            nucleus.append(token)
        mass += weight[token]
    allowed = [token for token in nucleus if weight[token] >= sampling.min_p * weight[order[0]]]
    out = np.zeros(len(weight))
    out[allowed] = weight[allowed] / weight[allowed].sum()
    return out


WISHES = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=1.7, top_k=5),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=10_000),
    Sampling(temperature=0.8, top_p=0.6),
    Sampling(temperature=1.0, top_p=1e-6),
    Sampling(temperature=1.2, min_p=0.2),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.1, top_k=7, top_p=0.8, min_p=0.05),
)


@pytest.mark.parametrize("wish", WISHES, ids=range(len(WISHES)))
@pytest.mark.parametrize("ties", [False, True])
def test_draws_have_the_reference_distribution(wish: Sampling, ties: bool) -> None:
    """1,000 draws of 1,000 seeds: never a barred token, and chi-square within reason (fixed seeds)."""
    draws, vocab = 1000, 12
    noise = np.random.default_rng(5).normal(0, 1.5, vocab)
    logits = np.round(noise) if ties else noise
    expected = reference(logits, wish)
    row = torch.tensor(logits, dtype=torch.float32)
    found = np.zeros(vocab)
    for seed in range(draws):
        found[one(row, sequence(wish, seed=seed)).token] += 1
    assert not found[expected == 0].any()
    likely = expected * draws > 5
    degrees = max(1, int(likely.sum()) - 1)
    chi_square = float((((found - expected * draws) ** 2)[likely] / (expected * draws)[likely]).sum())
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_tokens() -> None:
    """bfloat16 heads make many equal logits; which of them count must not depend on the machine."""
    row = torch.zeros(5000)
    row[4000] = 1.0
    wish = Sampling(temperature=1.0, top_k=3)
    seen = {one(row, sequence(wish, seed=seed)).token for seed in range(60)}
    assert seen == {4000, 0, 1}


def test_tiny_temperatures_are_greedy_and_not_nonsense() -> None:
    row = torch.tensor([-5.0, 3.0, 2.999, -1.0])
    for temperature in (1e-5, 1e-38, 1e-45):
        for seed in range(5):
            assert one(row, sequence(Sampling(temperature=temperature), seed=seed)).token == 1


def test_where_no_distribution_is_left_the_greatest_is_taken() -> None:
    """As the device sampler does: nothing kept, a bias beyond float32's 3.4e38, every token barred."""
    row, huge = torch.tensor([0.0, 1.0, 3.0, 0.0]), torch.tensor([0.0, 1.0, 2e38, 0.0])
    for seed in range(20):
        assert one(row, sequence(Sampling(temperature=1.0, top_p=0.0), seed=seed)).token == 2
        assert one(row, sequence(Sampling(temperature=1.0, min_p=1.5), seed=seed)).token == 2
        biased = Sampling(temperature=1.0, logit_bias=((2, 3e38),))
        assert one(huge, sequence(biased, seed=seed)).token == 2
        barred = sequence(Sampling(temperature=1.0), seed=seed)
        barred.min_tokens, barred.stop_ids = 1, frozenset(range(4))
        assert one(row, barred).token == 0


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    row = torch.tensor([1.0, 4.0, -2.0, 4.0])
    assert one(row, sequence(Sampling())).token == 1


def test_a_seeds_stream_is_its_own_whatever_runs_beside_it() -> None:
    """The same tokens alone, in a batch in any place, and after a restart with the tokens so far."""
    vocab, steps = 40, 12
    rows = torch.randn(steps, vocab, generator=torch.Generator().manual_seed(1)) * 2
    wish = Sampling(temperature=1.0)

    def run(others: int, place: int, start: int, generated: list[int]) -> list[int]:
        mine = sequence(wish, seed=2**64 - 1, generated=list(generated))
        beside = [sequence(wish, seed=i) for i in range(others)]
        for step in range(start, steps):
            together = [*beside[:place], mine, *beside[place:]]
            logits = torch.stack([rows[step] if s is mine else torch.randn(vocab) for s in together])
            for which, token in zip(together, sample(logits, together), strict=True):
                assert token is not None
                which.take(token.token)
        return mine.generated

    alone = run(0, 0, 0, [])
    assert len(set(alone)) > 4
    assert run(5, 3, 0, []) == alone
    assert run(2, 0, 7, alone[:7]) == alone


def test_seeds_and_places_draw_different_numbers() -> None:
    row = torch.zeros(2000)
    wish = Sampling(temperature=1.0)
    by_seed = [one(row, sequence(wish, seed=seed)).token for seed in range(300)]
    by_place = [one(row, sequence(wish, generated=[0] * place)).token for place in range(300)]
    for drawn in (by_seed, by_place):
        assert len(set(drawn)) > 250
        assert 850 < np.mean(drawn) < 1150


def test_penalties_and_bias_are_the_formulas() -> None:
    logits = np.array([2.0, -1.0, 0.5, 3.0, -2.0, 1.0])
    wish = Sampling(
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((1, 2.5), (5, -1.0)),
    )
    prompt, generated = [0, 4], [3, 3, 4]
    expected = logits.copy()
    for token in {*prompt, *generated}:
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(generated):
        expected[token] -= 0.7 * generated.count(token) + 0.4
    expected[1] += 2.5
    expected[5] -= 1.0
    row = torch.tensor(logits, dtype=torch.float32)
    kept = row.clone()
    assert one(row, sequence(wish, prompt=prompt, generated=generated)).token == int(expected.argmax())
    assert torch.equal(row, kept), "the model's own logits must stay as they are"
    # The whole distribution, by drawing from it at a temperature.
    drawn = np.zeros(6)
    warm = Sampling(
        temperature=1.5,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((1, 2.5), (5, -1.0)),
    )
    for seed in range(2000):
        drawn[one(row, sequence(warm, seed=seed, prompt=prompt, generated=generated)).token] += 1
    assert drawn / 2000 == pytest.approx(reference(expected, Sampling(temperature=1.5)), abs=0.04)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bars_the_stop_tokens_until_then(temperature: float) -> None:
    row = torch.tensor([0.0, 9.0, 8.0, -3.0])
    wish, stop = Sampling(temperature=temperature), frozenset({1, 2})
    tokens = []
    mine = sequence(wish, least=3, stop=stop)
    while mine.finish is None:
        tokens.append(one(row, mine).token)
        mine.take(tokens[-1])
    assert not stop & set(tokens[:3])
    assert tokens[3] in stop
    assert len(tokens) == 4


def test_log_probabilities_are_the_models_own() -> None:
    """Of the unchanged logits, whatever penalties and temperature did to the choice."""
    row = torch.randn(30, generator=torch.Generator().manual_seed(2))
    wish = Sampling(temperature=0.5, logprobs=True, top_logprobs=4, logit_bias=((7, 50.0),))
    token = one(row, sequence(wish))
    assert token.token == 7
    expected = row.log_softmax(0)
    assert token.logprob == pytest.approx(float(expected[7]))
    best = expected.argsort(descending=True)[:4].tolist()
    assert [top for top, _ in token.top] == best
    assert [value for _, value in token.top] == pytest.approx(expected[best].tolist())


def test_no_log_probabilities_unless_asked_for() -> None:
    assert one(torch.tensor([0.0, 1.0]), sequence(Sampling())) == SampledToken(1)


def test_prompt_log_probabilities() -> None:
    rows = torch.randn(3, 20, generator=torch.Generator().manual_seed(3))
    scored = score_prompt(rows, [4, 0, 19], Sampling(prompt_logprobs=True, top_logprobs=1))
    for row, token, got in zip(rows, [4, 0, 19], scored, strict=True):
        assert got.token == token
        assert got.logprob == pytest.approx(float(row.log_softmax(0)[token]))
        assert got.top[0][0] == int(row.argmax())


@pytest.mark.parametrize("wish", [Sampling(), Sampling(temperature=1.0, top_k=1)])
def test_known_tokens_are_replayed_and_never_drawn(wish: Sampling) -> None:
    """Not even where the model is sure of another, or a stop token is barred."""
    row = torch.tensor([0.0, 0.0, 50.0, 0.0])
    mine = sequence(wish, known=[3, 1], least=9, stop=frozenset({1}))
    for expected in (3, 1, 2):
        token = one(row, mine).token
        assert token == expected
        mine.take(token)


BROKEN = {
    "nan": [0.0, float("nan"), 1.0],
    "infinity": [0.0, float("inf"), 1.0],
    "nothing": [float("-inf")] * 3,
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("wish", [Sampling(), Sampling(temperature=1.0, top_p=0.5, min_p=0.1)])
def test_logits_without_a_number_give_no_token(name: str, wish: Sampling) -> None:
    """And only for the row they belong to."""
    logits = torch.stack([torch.tensor(BROKEN[name]), torch.tensor([0.0, 0.0, 90.0])])
    broken, sound = sample(logits, [sequence(wish), sequence(wish)])
    assert broken is None
    assert sound is not None
    assert sound.token == 2
