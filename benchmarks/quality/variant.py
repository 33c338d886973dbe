"""The variants that are compared, as hearts over one and the same resident KV.

Knows selectors. Prefill is dense and the same for all of them, and in full mode neither budget nor sharing
changes what lies on the device; so a variant is no more than another choice of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from services.decoder.attention.everything import Everything
from services.decoder.attention.heart import Heart
from services.decoder.attention.quest import Quest
from services.decoder.attention.selector import Selector
from services.decoder.engine.runner import Runner
from services.decoder.kernels.decode_batch import DecodeBatch
from services.decoder.kernels.twins import Twins
from services.decoder.kv.batch import PrefillChunk
from services.decoder.kv.bounds_index import BoundsIndex

Sharing = Literal["kv_head", "layer"]


@dataclass(frozen=True, slots=True)
class Variant:
    """Dense attention (budget 0), or Quest as the settings of the same names describe it."""

    budget_tokens: int = 0
    quest_sharing: Sharing = "kv_head"
    dense_layers: int = 0

    @property
    def name(self) -> str:
        """As results and the table call it."""
        if not self.budget_tokens:
            return "dense"
        exempt = f", {self.dense_layers} dense layers" if self.dense_layers else ""
        return f"{self.quest_sharing} {self.budget_tokens}{exempt}"

    def heart(self, runner: Runner) -> Heart:
        """Over the runner's residence, which must be `full` and laid out per KV head, and its bounds."""
        shape, bounds = runner.shape, runner.index
        assert shape.groups == shape.kv_heads
        assert isinstance(bounds, BoundsIndex)
        kernels = Twins()
        top_k = self.budget_tokens // shape.block_tokens

        def selector(layer: int) -> Selector:
            if not self.budget_tokens or layer < self.dense_layers:
                return Everything()
            if self.quest_sharing == "kv_head":
                return Quest(kernels, shape, bounds.layer(layer), top_k)
            one = replace(shape, groups=1)
            return _OneChoice(Quest(kernels, one, bounds.layer(layer), top_k), shape.groups)

        return Heart(kernels, shape, runner.residence, [selector(layer) for layer in range(shape.layers)])


class _OneChoice:
    """One choice for the whole layer, repeated for every KV head."""

    def __init__(self, quest: Quest, groups: int) -> None:
        self._quest = quest
        self._groups = groups
        self.bounds = quest.bounds

    def fill(self, chunk: PrefillChunk, key: Tensor) -> None:
        self._quest.fill(chunk, key)

    def observe(self, batch: DecodeBatch, key: Tensor) -> None:
        self._quest.observe(batch, key)

    def select(self, batch: DecodeBatch, query: Tensor) -> Tensor:
        one = self._quest.select(replace(batch, groups=1), query)
        return one.repeat_interleave(self._groups, dim=0)


DENSE = Variant()
BUDGETS = (256, 512, 1024, 2048)
ALL = (
    DENSE,
    *(Variant(budget, "kv_head") for budget in BUDGETS),
    *(Variant(budget, "layer") for budget in BUDGETS),
    *(Variant(budget, "kv_head", dense_layers=2) for budget in (512, 1024)),
)
