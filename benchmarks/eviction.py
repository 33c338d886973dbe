"""Eviction policies, replayed: what would have missed, had the hot buffer evicted otherwise.

Knows blocks by number and steps; no bytes. Every policy obeys the hot buffer's rules: what a step chose and
the open block are there when the step ends, so they are no victims of it; the open block is never fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int32]
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Stream:
    """What one lane chose."""

    chosen: tuple[Blocks, ...]  # by step, distinct blocks in the order of the choice
    opened: Blocks  # [steps], the open block; chosen or not
    blocks: int  # all blocks are below it

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[steps], blocks chosen."""
        return np.array([len(each) for each in self.chosen], np.int64)


class Touch(NamedTuple):
    """What a step does to blocks that are in the buffer when it ends."""

    step: int
    hits: Blocks
    misses: Blocks
    opened: int
    was_held: bool  # the open block, before


class Policy(Protocol):
    """What a block is worth."""

    def worth(self, step: int, blocks: Blocks) -> NDArray[np.float64] | NDArray[np.int64]:
        """Of candidates for eviction: the lowest go first; of equals, who was chosen longest ago."""

    def touch(self, touch: Touch) -> None:
        """Take a step in."""


class Lru:
    """DESIGN's order: stale, then this step's misses, then its hits, then the open block."""

    def __init__(self, stream: Stream) -> None:
        self._stamp = np.zeros(stream.blocks, np.int64)
        self._now = 1

    def worth(self, step: int, blocks: Blocks) -> NDArray[np.int64]:
        return self._stamp[blocks]

    def touch(self, touch: Touch) -> None:
        hits = touch.hits[np.argsort(self._stamp[touch.hits])]
        recent = np.concatenate([touch.misses, hits, [touch.opened]])
        self._stamp[recent] = np.arange(self._now, self._now + len(recent))  # the last of equals stays
        self._now += len(recent)


class Fifo:
    """Whatever came first, chosen since or not."""

    def __init__(self, stream: Stream) -> None:
        self._stamp = np.zeros(stream.blocks, np.int64)
        self._now = 1

    def worth(self, step: int, blocks: Blocks) -> NDArray[np.int64]:
        return self._stamp[blocks]

    def touch(self, touch: Touch) -> None:
        came = touch.misses if touch.was_held else np.append(touch.misses, touch.opened)
        self._stamp[came] = np.arange(self._now, self._now + len(came))
        self._now += len(came)


class Chance:
    """Any."""

    def __init__(self, stream: Stream) -> None:
        self._generator = np.random.default_rng(stream.blocks)

    def worth(self, step: int, blocks: Blocks) -> NDArray[np.float64]:
        return self._generator.random(len(blocks))

    def touch(self, touch: Touch) -> None:
        pass


class Belady:
    """Whatever will be chosen last: the fewest misses that any policy can have."""

    def __init__(self, stream: Stream) -> None:
        following = np.full(stream.blocks, _NEVER)
        self._after: list[
            NDArray[np.int64]
        ] = []  # by step, when its choices, then its open block, come again
        for step in reversed(range(len(stream.chosen))):
            chosen = stream.chosen[step]
            self._after.append(following[np.append(chosen, stream.opened[step])])
            following[chosen] = step
        self._after.reverse()
        self._stream = stream
        self._next = np.full(stream.blocks, _NEVER)

    def worth(self, step: int, blocks: Blocks) -> NDArray[np.int64]:
        return -self._next[blocks]

    def touch(self, touch: Touch) -> None:
        chosen = self._stream.chosen[touch.step]
        self._next[np.append(chosen, touch.opened)] = self._after[touch.step]


class Lrfu:
    """A count of choices that halves every `half_life` steps, kept for every block, in the buffer or not.

    A half-life near 0 is LRU by steps, a long one is LFU.
    """

    def __init__(self, stream: Stream, half_life: float) -> None:
        self._half_life = half_life
        self._count = np.zeros(stream.blocks)  # as it was at `last`
        self._last = np.zeros(stream.blocks)

    def worth(self, step: int, blocks: Blocks) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):  # an open block that nobody has chosen yet
            return np.log2(self._count[blocks]) + self._last[blocks] / self._half_life

    def touch(self, touch: Touch) -> None:
        for blocks in (touch.hits, touch.misses):
            age = touch.step - self._last[blocks]
            self._count[blocks] = self._count[blocks] * np.exp2(-age / self._half_life) + 1
            self._last[blocks] = touch.step


Make = Callable[[Stream], Policy]
POLICIES: Mapping[str, Make] = {"lru": Lru, "fifo": Fifo, "random": Chance, "belady": Belady}


def lrfu(half_life: float) -> Make:
    """LRFU of a half-life in steps."""
    return lambda stream: Lrfu(stream, half_life)


def misses(stream: Stream, make: Make, capacity: int) -> NDArray[np.int64]:
    """[steps] misses of a lane that begins with an empty buffer.

    Raises:
        ValueError: a step chooses more than fits.
    """
    policy = make(stream)
    resident, needed = (np.zeros(stream.blocks, bool) for _ in range(2))
    held = np.empty(0, np.int32)  # the blocks that are resident; who was chosen longest ago comes first
    counts = np.zeros(len(stream.chosen), np.int64)
    for step, (chosen, opened) in enumerate(zip(stream.chosen, stream.opened.tolist(), strict=True)):
        hit = resident[chosen] | (chosen == opened)
        missed = chosen[~hit]
        must = chosen if opened in chosen else np.append(chosen, np.int32(opened))
        if len(must) > capacity:
            raise ValueError(
                f"step {step} needs {len(must)} blocks at once; a capacity of {capacity} has no room"
            )
        needed[must] = True
        others = held[~needed[held]]
        needed[must] = False
        excess = len(others) + len(must) - capacity
        if excess > 0:
            victims = np.argsort(policy.worth(step, others), kind="stable")[:excess]
            resident[others[victims]] = False
            others = np.delete(others, victims)
        policy.touch(Touch(step, chosen[hit], missed, opened, bool(resident[opened])))
        resident[must] = True
        held = np.concatenate([others, must])
        counts[step] = len(missed)
    return counts
