"""What an offline engine computes of one sequence, where its pages lie, and what is in them."""

from __future__ import annotations

import torch

from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import StepPlan


class Watch:
    """Looks at every plan of the engine, from now on."""

    def __init__(self, engine: OfflineEngine, of: Sequence, *, poison: bool = False) -> None:
        """With `poison`, device memory is made worthless just before anything is loaded into it."""
        self.engine, self.of, self.poison = engine, of, poison
        self.computed = self.loads = 0  # tokens of the sequence; steps that loaded pages
        self._pages: list[int] = []
        engine.on_plan = self._note

    def _note(self, plan: StepPlan) -> None:
        self.computed += plan.decodes.count(self.of)
        self.computed += sum(end - start for one, start, end in plan.chunks if one is self.of)
        loads = bool(plan.loads or plan.arrivals)
        self.loads += loads
        if loads and self.poison:
            residence, index = self.engine.runner.residence, self.engine.runner.index
            for layer in range(self.engine.plan.shape.layers):
                _poison(residence.pool(layer))
            if index is not None:
                _poison(index.pool)
        if self.of.host_pages:
            self._pages = [page.page for page in self.of.host_pages]

    def bytes(self) -> list[torch.Tensor]:
        """Layer by layer, records of all tokens that were computed and the index of all full blocks."""
        shape, arena = self.engine.plan.shape, self.engine.arena
        tokens = len(self.of.prompt) + len(self.of.generated) - 1
        found = []
        for layer in range(shape.layers):
            records = arena.kv_blocks(layer).view(-1, shape.groups, shape.page_tokens, shape.record_elements)
            own = records[self._pages].transpose(1, 2).flatten(0, 1)
            found.append(own[:tokens].cpu())
            if shape.chooses(layer):
                blocks = arena.index(layer).view(-1, shape.blocks_per_page, shape.entry_elements)
                found.append(blocks[self._pages].flatten(0, 1)[: tokens // shape.block_tokens].cpu())
        return found


def _poison(pool: torch.Tensor) -> None:
    """No number, in eight bits neither: their scales are none."""
    pool.fill_(float("nan") if pool.is_floating_point() else 255)
