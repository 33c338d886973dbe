"""Who owns which parcels of the hot buffer: elastic capacity, decided between steps.

Pure Python: knows rows, tokens and counts; no tensors and no time.

Every seated row gets what it can use, as far as that is not above a common level: its blocks now, and an
eighth more for those to come. The level is the highest at which everyone's parcels exist, and it never
presses a row below its floor, which is counted at admission. So one row alone, or many short ones, have
everything resident; of long ones beside each other each has the same share. What is free is given to whoever
is below its target. From others, those who have most above theirs, a row takes only when it lacks more than
an eighth, or when its blocks are about to outgrow what it has. Nothing else moves, so capacities do not
flap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.decoder.kv.hot_class import HotClass, Resize

_NEVER = 1 << 62


@dataclass(slots=True)
class _Share:
    """What one row owns of one class, and wants."""

    reach: int  # tokens that the row may come to
    floor: int
    parcels: list[int] = field(default_factory=list)
    blocks: int = 0  # parcels that its tokens fill
    want: int = 0
    target: int = 0

    @property
    def lack(self) -> int:
        """Parcels below its target."""
        return max(0, self.target - len(self.parcels))

    @property
    def is_urgent(self) -> bool:
        """Whether others must give what it lacks."""
        owned = len(self.parcels)
        return self.lack > 0 and (
            owned < self.floor or 8 * self.lack > self.target or owned <= self.blocks < self.target
        )

    @property
    def surplus(self) -> int:
        """Parcels above its target."""
        return max(0, len(self.parcels) - self.target)


class _Pool:
    """One class of layers."""

    def __init__(self, number: int, of: HotClass, block_tokens: int) -> None:
        self.number = number
        self.of = of
        self.parcel_tokens = of.parcel_slots * block_tokens
        self.free = list(range(of.parcels - 1, -1, -1))
        self.shares: dict[int, _Share] = {}

    def floor(self, reach: int) -> int:
        """Parcels that a row of `reach` tokens must be able to have."""
        return min(self.of.floor, self._parcels_for(reach))

    def unpromised(self, without: Collection[int] = ()) -> int:
        """Parcels that no admitted row counts on, or none but those in `without`."""
        floors = sum(share.floor for row, share in self.shares.items() if row not in without)
        return self.of.parcels - floors

    def leave(self, row: int) -> None:
        self.free += reversed(self.shares.pop(row).parcels)

    def rebalance(self, tokens: dict[int, int]) -> list[Resize]:
        """Move rows to their targets; who loses comes first."""
        for row, now in tokens.items():
            self.shares[row].blocks = self._parcels_for(now)
        shares = {row: share for row, share in self.shares.items() if share.parcels or row in tokens}
        for share in shares.values():
            ahead = 1 + share.blocks // 8
            share.want = max(share.floor, min(share.blocks + ahead, self._parcels_for(share.reach)))
        level = self._level(list(shares.values()))
        for share in shares.values():
            share.target = max(share.floor, min(share.want, level))
        urgent = sum(share.lack for share in shares.values() if share.is_urgent)
        changed = self._take(shares, urgent - len(self.free))
        for row, share in sorted(shares.items(), key=lambda item: not item[1].is_urgent):
            if given := min(share.lack, len(self.free)):
                share.parcels += [self.free.pop() for _ in range(given)]
                changed.append(row)
        return [Resize(self.number, row, list(shares[row].parcels)) for row in changed]

    def due_at(self, row: int) -> int:
        """Tokens from which on the row wants more, as things are."""
        share = self.shares[row]
        owned = len(share.parcels)
        grows = share.blocks < owned < self._parcels_for(share.reach)
        return (owned - 1) * self.parcel_tokens + 1 if grows else _NEVER

    def _take(self, shares: dict[int, _Share], short: int) -> list[int]:
        """Free `short` parcels, of those who have most above their target; returns the rows."""
        losers = []
        for row, share in sorted(shares.items(), key=lambda item: -item[1].surplus):
            if short <= 0:
                break
            given = min(short, share.surplus)
            kept = len(share.parcels) - given
            self.free += reversed(share.parcels[kept:])
            del share.parcels[kept:]
            short -= given
            losers.append(row)
        assert short <= 0, "targets exceed the pool"
        return losers

    def _level(self, shares: list[_Share]) -> int:
        """The highest level at which the pool holds everyone's parcels."""
        low, high = 0, max((share.want for share in shares), default=0)
        while low < high:
            level = (low + high + 1) // 2
            if sum(max(share.floor, min(share.want, level)) for share in shares) <= self.of.parcels:
                low = level
            else:
                high = level - 1
        return low

    def _parcels_for(self, tokens: int) -> int:
        return min(self.of.most, -(-tokens // self.parcel_tokens))


class Capacities(NamedTuple):
    """Of rows in the last class of layers, which is Quest's where Quest chooses."""

    least_tokens: int = 0  # that the row with fewest slots has slots for; 0 without rows
    most_tokens: int = 0
    whole: int = 0  # rows with a slot for every block
    resizes: int = 0  # since start, of rows that had slots before


class CapacityBook:
    """The scheduler asks; what `rebalance` returns must be carried out before the step it was planned for."""

    def __init__(self, classes: Sequence[HotClass] = (), block_tokens: int = 1) -> None:
        """Without classes, as in full mode, everything fits and nothing is ever resized."""
        self._pools = [_Pool(number, of, block_tokens) for number, of in enumerate(classes)]
        self._due_at: dict[int, int] = {}  # a seated row -> tokens
        self._stale = False  # somebody came or left since the last rebalance
        self._resizes = 0

    @property
    def unpromised(self) -> int:
        """Parcels that no admitted row counts on, all classes together."""
        return sum(pool.unpromised() for pool in self._pools)

    def fits(self, reach: int, without: Collection[int] = ()) -> bool:
        """Whether one more row's floor is there, if it comes to `reach` tokens and rows `without` leave."""
        return all(pool.floor(reach) <= pool.unpromised(without) for pool in self._pools)

    def admit(self, row: int, reach: int) -> None:
        """Count on a row of at most `reach` tokens; it gets parcels when it is first in a `rebalance`."""
        for pool in self._pools:
            assert row not in pool.shares, "a row is admitted once"
            pool.shares[row] = _Share(reach, pool.floor(reach))

    def leave(self, row: int) -> None:
        """Take a row's parcels; they may be given away by the next `rebalance`."""
        for pool in self._pools:
            pool.leave(row)
        self._due_at.pop(row, None)
        self._stale = True

    def is_due(self, seated: Iterable[tuple[int, int]]) -> bool:
        """Whether `rebalance` might change anything, for rows of so many tokens."""
        due_at = self._due_at
        return bool(self._pools) and (
            self._stale or any(row not in due_at or tokens >= due_at[row] for row, tokens in seated)
        )

    def rebalance(self, seated: Iterable[tuple[int, int]]) -> list[Resize]:
        """What changes hands before a step, the losers first.

        Args:
            seated: each row that decodes in the step or is seated by it, and its tokens then; all of them.
        """
        tokens = dict(seated)
        if not self.is_due(tokens.items()):
            return []
        resizes = [resize for pool in self._pools for resize in pool.rebalance(tokens)]
        self._resizes += sum(row in self._due_at for _, row, _ in resizes)
        self._due_at = {row: min(pool.due_at(row) for pool in self._pools) for row in tokens}
        self._stale = False
        return resizes

    def capacities(self) -> Capacities:
        """Figures of now."""
        if not self._pools:
            return Capacities()
        pool = self._pools[-1]
        shares = [share for share in pool.shares.values() if share.parcels]
        tokens = [len(share.parcels) * pool.parcel_tokens for share in shares]
        whole = sum(share.blocks <= len(share.parcels) for share in shares)
        return Capacities(min(tokens, default=0), max(tokens, default=0), whole, self._resizes)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every parcel is free or owned once, and every floor can be met."""
        for pool in self._pools:
            owned = [parcel for share in pool.shares.values() for parcel in share.parcels]
            assert sorted(owned + pool.free) == list(range(pool.of.parcels)), "parcels lost or owned twice"
            assert pool.unpromised() >= 0, "more was promised than there is"
