"""Weights of several projections as one matrix, without a second copy in memory.

Knows torch's linear modules, not what they project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """One projection for several: their outputs stand side by side, in order."""

    weight: Tensor  # [sum of outputs, inputs]
    bias: Tensor | None  # [sum of outputs]

    @classmethod
    def of(cls, modules: Sequence[nn.Linear]) -> FusedWeights:
        """Concatenate; the modules' own parameters become views of the result, so they go on working.

        A single module's weights stay where they are. While several are joined, their memory is needed twice.

        Raises:
            ValueError: some have a bias and some have none.
        """
        biases = [module.bias for module in modules]
        if len({bias is None for bias in biases}) > 1:
            raise ValueError("modules with and without a bias cannot be fused")
        weight = _join([module.weight for module in modules])
        return cls(weight, _join(biases) if biases[0] is not None else None)


@torch.no_grad()
def _join(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenate by rows, and let each parameter lie in the result."""
    if len(parameters) == 1:
        return parameters[0].detach()
    joined = torch.cat([parameter.detach() for parameter in parameters])
    parts = torch.split(joined, [parameter.shape[0] for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part  # the Parameter object stays, whoever else holds it
    return joined
