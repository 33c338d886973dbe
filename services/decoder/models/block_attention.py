"""Models that choose blocks by themselves, between transformers' attention and hotset's.

Knows what NSA and MiniMax-M3 hand to the attention interface; not who attends. M3's indexer makes index
queries and keys and leaves the choice to us: its attention module passes on whatever its indexer returns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from services.decoder.attention.block_selector import BlockInput
from services.decoder.attention.block_step import BlockStep
from services.decoder.kernels.rope import turn_halves
from services.decoder.models.nsa import BRANCHES


def attend_gated(
    step: BlockStep,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    gates: Tensor,
    weights: Tensor,
) -> Tensor:
    """NSA's attention, `[tokens, query heads, head_dim]`.

    Args:
        step: this forward pass.
        layer: which layer.
        query: [tokens, query heads, head_dim], after rope, packed.
        key: [tokens, kv_heads, head_dim], after rope, packed.
        value: the same shape as `key`.
        scaling: factor on q.k.
        gates: [tokens, branches * query heads], by branch, then head.
        weights: [2, kv_heads, tokens of an entry].
    """
    found = BlockInput(query, key, value, weights)
    branches = step.attend_blocks(layer, query, key, value, found, scaling)
    each = gates.view(gates.shape[0], BRANCHES, -1, 1).unbind(1)
    return torch.stack([gate * branch for gate, branch in zip(each, branches, strict=True)]).sum(0)


class BlockIndexer(nn.Module):
    """Takes the place of MiniMax-M3's indexer and keeps its projections and norms."""

    def __init__(self, indexer: nn.Module) -> None:
        super().__init__()
        self._parts = [indexer.get_submodule(name) for name in ("q_proj", "q_norm", "k_proj", "k_norm")]
        size = indexer.head_dim
        assert isinstance(size, int)
        self._size = size

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: object,
        position_ids: Tensor,
    ) -> BlockInput:
        """Index queries and keys of the packed batch, in the place and under the names of the indexer's.

        Args:
            hidden_states: [1, tokens, hidden size].
            position_embeddings: cosines and sines, [1, tokens, roped] each.
            cache: unused.
            position_ids: unused.
        """
        query_proj, query_norm, key_proj, key_norm = self._parts
        hidden = hidden_states.squeeze(0)
        cos, sin = (table.squeeze(0).unsqueeze(1)[..., : self._size] for table in position_embeddings)
        roped = cos.shape[2]
        query, key = (
            norm(proj(hidden).view(hidden.shape[0], -1, self._size))
            for proj, norm in ((query_proj, query_norm), (key_proj, key_norm))
        )
        query, key = (
            torch.cat([turn_halves(part[..., :roped], cos, sin), part[..., roped:]], dim=2)
            for part in (query, key)
        )
        return BlockInput(query, key)


def wire_indexers(model: nn.Module) -> None:
    """Put our indexer into every sparse layer of a loaded MiniMax-M3."""
    for layer in model.get_submodule("model.layers").children():
        attention = layer.get_submodule("self_attn")
        if isinstance(attention.indexer, nn.Module):
            attention.set_submodule("indexer", BlockIndexer(attention.indexer))
