"""The columns of a layer's counters.

Knows no tensors, so that whoever only reads the figures needs no torch.
"""

from __future__ import annotations

from enum import IntEnum


class Counter(IntEnum):
    """Columns of a layer's counters; hits + misses = chosen, fetched bytes = misses x block bytes.

    A layer that follows another one's choice counts only its own misses, bytes and time.
    """

    CHOSEN = 0  # distinct blocks selected; the open block only if chosen
    HITS = 1
    MISSES = 2
    EVICTIONS = 3
    FETCHED_BYTES = 4
    NANOSECONDS = 5
