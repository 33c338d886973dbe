"""sample: the next token of each row, from its logits, its wishes and what it has said before.

Knows rows of tables, no sequences. Two ways lead to the same tokens: this file, plain torch, is the
definition of the kernel (gpu/sample.cu); engine/sampler.py, which sums float64, is what both are tested by.

A token's weight is a whole number here, exp((logit - greatest) / temperature) in units of 2**-mass_bits. Sums
of whole numbers do not depend on their order, so a kernel may add them up as it likes. Where float64 rounds
each sum, this rounds each token's weight; so a draw can fall to the neighbour of the token that
engine/sampler.py takes, if the uniform number lies within that rounding of the border between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
import torch
from torch import Tensor

from services.decoder.kernels.sample_limits import MOST_BARRED, MOST_BIASED


class Wish(IntEnum):
    """Columns of SampleTables.wishes."""

    TEMPERATURE = 0
    TOP_P = auto()
    MIN_P = auto()
    TOP_K = auto()  # 0 = all
    REPETITION = auto()
    FREQUENCY = auto()
    PRESENCE = auto()
    PENALISED = auto()  # 1 if any of the three is not neutral; counts are kept for such rows only
    BIASED = auto()  # entries of the row's bias list
    STOPS = auto()  # entries of the row's list of stop tokens


@dataclass(frozen=True, slots=True)
class SampleTables:
    """What is kept for every row of the tables; written when a row is seated."""

    wishes: Tensor  # [table rows, len(Wish)] float64
    seeds: Tensor  # [table rows] int64, the bits of an unsigned number
    counts: Tensor  # [table rows, vocab] int32: 2 * times generated, + 1 if the prompt has the token
    bias_ids: Tensor  # [table rows, MOST_BIASED] int32, distinct
    biases: Tensor  # [table rows, MOST_BIASED] float32
    stop_ids: Tensor  # [table rows, MOST_BARRED] int32

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device) -> SampleTables:
        """Tables in which nobody sits."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            wishes=zeros(rows, len(Wish), dtype=torch.float64),
            seeds=zeros(rows, dtype=torch.int64),
            counts=zeros(rows, vocab, dtype=torch.int32),
            bias_ids=zeros(rows, MOST_BIASED, dtype=torch.int32),
            biases=zeros(rows, MOST_BIASED, dtype=torch.float32),
            stop_ids=zeros(rows, MOST_BARRED, dtype=torch.int32),
        )

    @staticmethod
    def row_bytes(vocab: int) -> int:
        """What a row of the tables takes."""
        return 8 * len(Wish) + 8 + 4 * vocab + 8 * MOST_BIASED + 4 * MOST_BARRED


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """What a step brings; R rows, of which the first real_rows count. int32."""

    seats: Tensor  # [R] rows of the tables
    positions: Tensor  # [R] tokens generated so far
    forced: Tensor  # [R] the token that must come, -1 = draw one
    barred: Tensor  # [R] 1 where stop tokens may not come yet
    real_rows: Tensor  # [1]


def mass_bits(vocab: int) -> int:
    """As many as keep the sum of all weights below 2**63."""
    return 62 - (vocab - 1).bit_length()


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to a seed and a place in the answer, whatever ran beside it.

    Philox is counter-based, so a replay or a restart draws the same numbers without any saved state.
    """
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position << 64))
    return float(generator.random())


def sample(tables: SampleTables, inputs: SampleInputs, logits: Tensor, scale: float, tokens: Tensor) -> None:
    """Write the next token of every real row, and count it where penalties need that.

    Args:
        tables: by seat.
        inputs: by row.
        logits: [R, vocab] float32, bfloat16 or float16.
        scale: factor on the logits, applied in float32.
        tokens: out [R] int32; -1 where the greatest logit is no finite number. Padding rows stay as they are.
    """
    for row in range(int(inputs.real_rows)):
        seat = int(inputs.seats[row])
        tokens[row] = _next(tables, inputs, row, seat, logits[row].float() * scale)
        if tables.wishes[seat, Wish.PENALISED] and tokens[row] >= 0:
            tables.counts[seat, tokens[row]] += 2


def _next(tables: SampleTables, inputs: SampleInputs, row: int, seat: int, logits: Tensor) -> int:
    if not logits.max().isfinite():  # a NaN counts as the greatest
        return -1
    if inputs.forced[row] >= 0:
        return int(inputs.forced[row])
    logits = _adjusted(tables, seat, logits, barred=bool(inputs.barred[row]))
    wishes = tables.wishes[seat].tolist()
    if wishes[Wish.TEMPERATURE] == 0 or not logits.max().isfinite():
        return int(logits.argmax())
    seed = int(tables.seeds[seat]) % 2**64
    return _draw(logits, wishes, uniform(seed, int(inputs.positions[row])))


def _adjusted(tables: SampleTables, seat: int, logits: Tensor, *, barred: bool) -> Tensor:
    """Penalties, bias, barred tokens; every operation rounds to float32."""
    wishes = tables.wishes[seat].tolist()
    if wishes[Wish.PENALISED]:
        count = tables.counts[seat]
        penalty = wishes[Wish.REPETITION]
        logits = torch.where(count > 0, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        times = count >> 1
        less = wishes[Wish.FREQUENCY] * times + wishes[Wish.PRESENCE]
        logits = torch.where(times > 0, logits - less, logits)
    biased, stops = int(wishes[Wish.BIASED]), int(wishes[Wish.STOPS])
    logits = logits.index_add(0, tables.bias_ids[seat, :biased], tables.biases[seat, :biased])
    return logits.index_fill(0, tables.stop_ids[seat, :stops].long(), float("-inf")) if barred else logits


def _draw(logits: Tensor, wishes: list[float], number: float) -> int:
    """Invert the cumulative distribution at `number`, likeliest token first; ties in token order."""
    likeliness = ((logits.double() - logits.max().double()) * (1 / wishes[Wish.TEMPERATURE])).exp()
    weight = (likeliness * 2.0 ** mass_bits(logits.shape[0])).round().long()
    order = logits.sort(descending=True, stable=True).indices[: int(wishes[Wish.TOP_K]) or None]
    mass = weight[order].cumsum(0)
    end = total = int(mass[-1])
    if wishes[Wish.TOP_P] < 1:
        end = int(mass[_reaching(mass, wishes[Wish.TOP_P] * float(total), total)])
    if wishes[Wish.MIN_P] > 0:
        end = min(end, int(weight[order[likeliness[order] >= wishes[Wish.MIN_P]]].sum()))
    return int(order[_reaching(mass, math.floor(number * float(end)) + 1, end)])


def _reaching(mass: Tensor, goal: float, most: int) -> int:
    """The first place at which the cumulative `mass` is `goal` or more, or else `most`."""
    return int(torch.searchsorted(mass, min(max(math.ceil(goal), 1), most)))
