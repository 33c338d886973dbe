"""What the GPU's own clock said of the steps so far.

Knows numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Sums since start, of steps whose successor was collected."""

    steps: int = 0  # that decoded and did nothing else
    decode_ns: int = 0  # between the inputs' copy and the logits of those steps
    busy_ns: int = 0  # from the first launch to the last of any step, rows that leave, grow or load included
    idle_ns: int = 0  # from there to the next step, where that one continues rows
