"""Hits first: attention over what is resident while the rest comes, then over that, and both as one.

The order of the sums depends on what was resident, so the last bits of an answer do. Knows a split and whom
to wait for; not what attends, nor how the bytes come.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.step_kernels import Split, StepKernels
from services.decoder.kv.residence import Residence


def attend_halves(
    kernels: StepKernels,
    residence: Residence,
    layer: int,
    split: Split,
    attend: Callable[[Tensor, bool], Part],
    dtype: torch.dtype,
) -> Tensor:
    """Attention of decode rows in a layer whose misses are under way.

    Args:
        kernels: what merges.
        residence: who knows when they are there.
        layer: which layer.
        split: its placement's.
        attend: over one half's blocks; true where another stream's work was joined just before.
        dtype: of the result.

    Returns:
        [rows, query heads, numbers of a value].
    """
    hits = attend(split.hits, False)
    residence.arrive(layer)
    misses = attend(split.misses, True)
    return kernels.merge_parts(hits, misses, dtype).out
