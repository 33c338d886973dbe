"""Streams of choices: a synthetic one that misses as a published model does, and those of a recorded trace.

Knows statistics and the recorder's file; no policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.eviction import Blocks, Stream
from services.decoder.attention.selection_file import read_frames

_WALKS = ((0.769, 334.0), (0.264, 6.9), (0.578, 7.0))  # sigma, tau in steps of Ornstein-Uhlenbeck processes
_NOISE = 0.209
_RECENCY, _RECENCY_STEPS = 0.736, 700.0
_SINKS = 4


def synthetic(context: int = 100_384, steps: int = 1_000, top_k: int = 2_048, seed: int = 0) -> Stream:
    """One layer of GLM-5.1, so to speak: its miss rates are those that arXiv 2608.07009 reports.

    A token's score is a constant of its own, three processes that wander and come back, noise, and a bonus
    for recent tokens; the first tokens and the newest are always chosen. Its memory over hundreds of steps
    is too short: of a choice 34% comes again 64 steps later, where 56% was published.
    """
    generator = np.random.default_rng(seed)
    longest = context + steps

    def draw(count: int) -> NDArray[np.float32]:
        return generator.standard_normal(count, np.float32)

    constant = draw(longest)
    walks = [
        (np.float32(sigma) * draw(longest), np.float32(np.exp(-1 / tau)), sigma) for sigma, tau in _WALKS
    ]
    recency = np.float32(_RECENCY) * np.exp(
        -np.arange(longest, dtype=np.float32) / np.float32(_RECENCY_STEPS)
    )
    chosen = []
    for step in range(steps):
        newest = context + step
        score = constant[: newest + 1] + recency[newest::-1]
        for value, stay, sigma in walks:
            value *= stay
            value += np.float32(sigma) * np.sqrt(1 - stay * stay) * draw(longest)
            score += value[: newest + 1]
        score += np.float32(_NOISE) * draw(newest + 1)
        score[:_SINKS] = np.inf
        score[newest] = np.inf
        best = np.argpartition(-score, top_k - 1)[:top_k]
        chosen.append(best[np.argsort(-score[best], kind="stable")].astype(np.int32))
    return Stream(tuple(chosen), np.arange(context, longest, dtype=np.int32), longest)


class Lane(NamedTuple):
    """Whose stream it is."""

    row: int
    first: int  # position of its first decoded token
    layer: int
    group: int


def recorded(path: Path, block_tokens: int) -> Iterator[tuple[Lane, Stream]]:
    """The streams of a recorder's file, by sequence, layer and group.

    A sequence is a run of positions in one row and layer, one after the other.
    """
    steps: dict[tuple[int, int, int], list[tuple[int, NDArray[np.int32]]]] = {}
    current: dict[tuple[int, int], tuple[int, int]] = {}  # (layer, row) -> first and last position
    for frame in read_frames(path):
        for row, position, blocks in zip(
            frame.rows.tolist(), frame.positions.tolist(), frame.blocks.astype(np.int32), strict=True
        ):
            first, last = current.get((frame.layer, row), (position, position - 1))
            if position != last + 1:
                first = position
            current[frame.layer, row] = first, position
            steps.setdefault((row, first, frame.layer), []).append((position, blocks))
    for (row, first, layer), found in sorted(steps.items(), key=lambda item: item[0]):
        opened = np.array([position // block_tokens for position, _ in found], np.int32)
        for group in range(found[0][1].shape[0]):
            chosen = tuple(_distinct(blocks[group]) for _, blocks in found)
            yield Lane(row, first, layer, group), Stream(chosen, opened, int(opened[-1]) + 1)


def _distinct(blocks: Blocks) -> Blocks:
    """Without -1 and repetitions, in the same order."""
    real = blocks[blocks >= 0]
    _, first = np.unique(real, return_index=True)
    return real if len(first) == len(real) else real[np.sort(first)]
