"""Experts dealt evenly: a router runs and is paid for, then its choice is put aside.

Random weights have no balance. Rows that say the same token choose the same experts, and which rows do so
depends on what was attended to: one mode would read a quarter of the experts' weights, another all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_DEALT = 8192  # different deals, before they come again
_APART = 57  # between two rows' deals in a step


class DealtExperts:
    """In place of the choices of all routers of a model, from now on; captured with the step."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Routers are the modules that transformers gives a correction bias."""
        routers = [
            module
            for module in model.modules()
            if "e_score_correction_bias" in dict(module.named_buffers(recurse=False))
        ]
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._current = torch.zeros(0, dtype=torch.int64, device=device)
        if not routers:
            return
        experts, chosen = routers[0].num_experts, routers[0].top_k
        assert isinstance(experts, int)
        assert isinstance(chosen, int)
        draw = torch.rand(
            _DEALT, len(routers), experts, generator=torch.Generator(device).manual_seed(4), device=device
        )
        self._deals = draw.topk(chosen, dim=2).indices  # [deals, routers, chosen]
        for place, router in enumerate(routers):
            router.register_forward_hook(
                lambda _, __, output, place=place: (output[0], output[1], self._deal(output[2], place))
            )

    def _deal(self, own: Tensor, place: int) -> Tensor:
        """[tokens, chosen] int64 of one router, whose `own` choice is not looked at."""
        if place == 0:
            self._step.add_(1)
            row = torch.arange(own.shape[0], device=own.device)
            self._current = self._deals.index_select(0, (row * _APART + self._step) % _DEALT)
        return self._current[:, place].contiguous()
