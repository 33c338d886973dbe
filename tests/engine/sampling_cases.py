"""Random requests and logits to sample from: what the tests of both samplers share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from services.decoder.engine.device_sampler import DeviceSampler
from services.decoder.engine.sampler import sample
from services.decoder.engine.sequence import Sampling, Sequence

Kind = Literal["normal", "ties", "peaked", "wild", "broken"]


def random_sampling(chance: random.Random, vocab: int) -> Sampling:
    """Any mixture of wishes, their neutral values and their extremes included."""
    pick = chance.choice
    return Sampling(
        temperature=pick([0.0, 0.01, 0.3, 0.7, 1.0, 1.0, 1.5, 3.0, chance.uniform(0.01, 3)]),
        top_p=pick([1.0, 1.0, 1e-6, 0.5, 0.9, 0.999, chance.uniform(1e-3, 1)]),
        top_k=pick([0, 0, 1, 2, 50, vocab - 1, vocab, 2**31 - 1, chance.randint(1, vocab)]),
        min_p=pick([0.0, 0.0, 0.0, 1e-3, 0.1, 1.0, chance.random()]),
        frequency_penalty=pick([0.0, 0.0, chance.uniform(-2, 2)]),
        presence_penalty=pick([0.0, 0.0, chance.uniform(-2, 2)]),
        repetition_penalty=pick([1.0, 1.0, 0.01, 1.3, 100.0]),
        logit_bias=tuple(
            (token, pick([-100.0, 100.0, chance.uniform(-5, 5)]))
            for token in chance.sample(range(vocab), min(vocab, pick([0, 0, 1, 20])))
        ),
    )


def random_sequence(chance: random.Random, vocab: int) -> Sequence:
    """A sequence without a row, sometimes with an answer to replay or stop tokens to keep away."""

    def tokens(most: int) -> list[int]:
        return [chance.randrange(vocab) for _ in range(chance.randint(0, most))]

    plain = chance.random() < 0.2
    return Sequence(
        "r",
        0,
        [chance.randrange(vocab), *tokens(50)],
        Sampling() if plain else random_sampling(chance, vocab),
        seed=chance.choice([0, 2**64 - 1, chance.randrange(2**64)]),
        max_tokens=chance.randint(1, 30),
        min_tokens=chance.choice([0, 0, 5]),
        # Never every token: nothing would be left to draw while they are barred.
        stop_ids=frozenset(chance.sample(range(vocab), min(vocab - 1, chance.choice([0, 1, 10])))),
        known=chance.choice([[], [], tokens(6)]),
    )


def logits_of(kind: Kind, rows: int, vocab: int, seed: int) -> Tensor:
    """[rows, vocab] float32.

    `ties` are as coarse as a bfloat16 head's; `wild` spans all magnitudes, minus infinity included; `broken`
    has rows with a NaN, an infinity or nothing but minus infinity.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    if kind == "ties":
        return (logits * 2).round() / 2
    if kind == "peaked":
        logits[:, seed % vocab] += 25
    elif kind == "wild":
        exponent = torch.randint(-40, 36, logits.shape, generator=generator)
        logits = logits * 10.0**exponent
        absent = torch.rand(rows, vocab, generator=generator) < 0.2
        absent[:, 0] = False
        logits = logits.masked_fill(absent, float("-inf"))
    elif kind == "broken":
        fate = torch.randint(0, 6, (rows,), generator=generator)
        at = seed % vocab
        logits[fate == 0, at] = float("nan")
        logits[fate == 1, at] = float("inf")
        logits[fate == 2] = float("-inf")
        logits[fate == 3, at] = float("-inf")
    return logits


def drawn(sampler: DeviceSampler, logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """The device's tokens."""
    greedy = sampler.prepare(sequences)
    return sampler.draw(logits, greedy=greedy)[: len(sequences)].tolist()


def defined(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """What sampler.py says; -1 where it has no token."""
    return [-1 if token is None else token.token for token in sample(logits.float(), sequences)]


@dataclass
class Tally:
    """Tokens compared."""

    checked: int = 0
    differing: int = 0


def check_history(
    sampler: DeviceSampler,
    kind: Kind,
    vocab: int,
    rows: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> Tally:
    """Rows come and go, batches are shuffled, answers replayed; every token is compared with sampler.py's."""
    chance = random.Random(f"{kind} {vocab} {rows} {dtype}")
    seats: list[Sequence | None] = [None] * rows
    tally = Tally()
    for _ in range(steps):
        for row, held in enumerate(seats):
            if held is None or held.finish is not None or chance.random() < 0.05:
                held = random_sequence(chance, vocab)
                seats[row], held.row = held, row
                sampler.seat(held)
        batch = [sequence for sequence in seats if sequence is not None and chance.random() < 0.8]
        chance.shuffle(batch)
        if not batch:
            continue
        logits = logits_of(kind, len(batch) + padding, vocab, chance.randrange(2**32)).to(dtype)
        expected = defined(logits[: len(batch)], batch)
        found = drawn(sampler, logits.to(sampler.tokens.device), batch)
        tally.checked += len(batch)
        for sequence, token, theirs in zip(batch, expected, found, strict=True):
            if token >= 0:
                sequence.take(token)
            if token != theirs:
                tally.differing += 1
                sampler.seat(sequence)  # it counted the other token
    return tally
