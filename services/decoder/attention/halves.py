"""Hits first: attention over what is resident while the rest comes, then over that, and both as one.

The order of the sums depends on what was resident, so the last bits of an answer do. Knows a split and whom
to wait for; not what attends, nor how the bytes come.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.decoder.kernels.attend_part import Part
from services.decoder.kernels.step_kernels import Placement, StepKernels
from services.decoder.kv.residence import Residence


def attend_halves(
    kernels: StepKernels,
    residence: Residence,
    layer: int,
    placement: Placement,
    attend: Callable[[Tensor, Tensor, bool], Part],
    dtype: torch.dtype,
) -> Tensor:
    """Attention of decode rows in a layer whose misses are under way.

    Args:
        kernels: what merges.
        residence: who knows when they are there.
        layer: which layer.
        placement: in that layer, with a split.
        attend: over slots and the blocks in them; true where another stream's work was joined just before.
        dtype: of the result.

    Returns:
        [rows, query heads, numbers of a value].
    """
    split, plan = placement.split, placement.plan
    assert split is not None, "whoever splits plans"
    assert plan is not None, "likewise"
    hits = attend(placement.slots, split.hits, False)
    residence.arrive(layer)
    misses = attend(plan.target, split.misses, True)
    return kernels.merge_parts(hits, misses, dtype).out
