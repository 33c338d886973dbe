"""Numbers on their way to a device, which nobody waits for.

Knows numbers. A list that torch is given with a device waits until the device has done all that it was told
before; a step launched while another one runs would so wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(numbers: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[lists, numbers] int64 on the device, without waiting for it: lists of one length."""
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
