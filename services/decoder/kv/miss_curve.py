"""What hot buffers of other sizes would have missed, from the choices of a few sampled lanes.

Knows blocks and capacities, as numbers and arrays; no torch and no bytes. A lane's blocks in the order of
their last use are the LRU of every capacity at once (Mattson et al. 1970): a buffer of C slots holds the C
used last. So one order a lane answers for all sizes. It is lanes that are sampled; each is followed closely.

Two things are approximate. Blocks chosen by the same step are ordered as if none of them had been missed.
And a lane that shrinks and grows again is taken to have kept what it lost in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CAPACITIES = (0.5, 1.0, 2.0, 4.0)
"""Of the slots that a lane owns in the step, the sizes that are asked about."""

_ALWAYS = np.iinfo(np.int64).max


class LaneChoice(NamedTuple):
    """What one lane chose in one step."""

    row: int
    capacity: int  # slots of the lane, now
    opened: int  # its open block: held by a buffer of any size
    chosen: NDArray[np.int32]  # [top_k] blocks, repeated ones and -1 among them


class MissCurve:
    """Counts over all sampled lanes since start. Written by the engine's loop; any thread may read."""

    def __init__(self, layers: Collection[int]) -> None:
        """Of lanes in these layers; which of a layer's lanes is for the caller to say, always the same."""
        self.layers = frozenset(layers)
        self.chosen = 0
        self.misses = [0] * len(CAPACITIES)
        self._lanes: dict[tuple[int, int], _Lane] = {}  # layer, row

    def note(self, layer: int, choices: Iterable[LaneChoice]) -> None:
        """Take in one layer's choices of one step, in the order of the steps."""
        for choice in choices:
            lane = self._lanes.setdefault((layer, choice.row), _Lane())
            blocks, missed = lane.use(choice)
            self.chosen += blocks
            self.misses = [before + more for before, more in zip(self.misses, missed, strict=True)]

    def leave(self, row: int) -> None:
        """Forget a row, which will be another's."""
        for layer in self.layers:
            self._lanes.pop((layer, row), None)


class _Lane:
    """When each block was last used: larger is later, 0 is never."""

    def __init__(self) -> None:
        self._used = np.zeros(64, np.int64)
        self._now = 1

    def use(self, choice: LaneChoice) -> tuple[int, list[int]]:
        """How many blocks were chosen, and how many of them a buffer of each size would have missed."""
        self._reach(choice.opened)
        chosen = choice.chosen[choice.chosen >= 0]
        _, first = np.unique(chosen, return_index=True)
        chosen = chosen[np.sort(first)]
        used = self._used[chosen]
        used[chosen == choice.opened] = _ALWAYS
        misses = [int((used < oldest).sum()) for oldest in self._oldest_held(choice.capacity)]
        later = chosen[np.argsort(used, kind="stable")]  # as resolve has it: misses, hits, the open block
        self._used[later] = np.arange(self._now, self._now + len(later))
        self._used[choice.opened] = self._now + len(later)
        self._now += len(later) + 1
        return len(chosen), misses

    def _oldest_held(self, capacity: int) -> list[int]:
        """By size, the least entry of a block that is held; 1 where all that were used are."""
        length = len(self._used)
        held = [min(length, int(capacity * size)) for size in CAPACITIES]
        ranked = np.partition(self._used, [length - count for count in held if count])
        return [max(1, int(ranked[length - count])) if count else _ALWAYS for count in held]

    def _reach(self, block: int) -> None:
        if block >= len(self._used):
            more = max(block + 1 - len(self._used), len(self._used))
            self._used = np.concatenate([self._used, np.zeros(more, np.int64)])
