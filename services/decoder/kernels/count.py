"""Adding to a layer's counters, all of them at once.

Knows columns and amounts. Somebody may read the counters meanwhile, from another thread, and is to find hits
+ misses = chosen: so they change by one operation, not one after another.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from services.decoder.kernels.counter import Counter


def count(counters: Tensor, amounts: Mapping[Counter, int]) -> None:
    """Add `amounts` to `counters`, [len(Counter)] int64."""
    counters += torch.tensor([amounts.get(each, 0) for each in Counter], device=counters.device)
