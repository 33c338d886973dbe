"""MLA with a DSA indexer, absorbed: transformers' projections around hotset's latent attention.

Takes the place of an attention module in a loaded model and keeps that module's projections and norms. Keys
and values are never expanded: the key projection goes into the query, the value projection behind what was
attended to. Knows how `deepseek_v32` and `glm_moe_dsa` are wired; not rows, pages or who attends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from services.decoder.attention.latent_heart import IndexInput
from services.decoder.attention.latent_step import Choice, LatentStep
from services.decoder.kernels.choose_tokens import IndexQuery
from services.decoder.kernels.rope import turn_halves, turn_pairs
from services.decoder.models.latent_spec import LatentSpec

Turn = Callable[[Tensor, Tensor, Tensor], Tensor]

INDEXER_ROPE: dict[str, Turn] = {"deepseek_v32": turn_halves, "glm_moe_dsa": turn_pairs}
"""Model type -> how its indexer turns queries and keys: V3.2's by halves, unlike its attention."""


class LatentAttention(nn.Module):
    """One layer's attention over a packed batch."""

    def __init__(self, attention: nn.Module, model_type: str, latent: LatentSpec, layer: int) -> None:
        """Take over the parts of `attention`, layer `layer` of a `model_type` model."""
        super().__init__()
        self._layer = layer
        self._sizes = latent
        self._returns_choice = model_type == "glm_moe_dsa"
        self._turn = INDEXER_ROPE[model_type]
        scaling = attention.scaling
        assert isinstance(scaling, float)
        self._scaling = scaling
        self._query_down, self._query_norm, self._query_up = (
            attention.get_submodule(name) for name in ("q_a_proj", "q_a_layernorm", "q_b_proj")
        )
        self._record, self._latent_norm, self._latent_up, self._output = (
            attention.get_submodule(name)
            for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        )
        self._chooses = latent.anchors[layer] == layer
        if self._chooses:
            self._index_query, self._index_key, self._index_norm, self._index_weight = (
                attention.get_submodule(f"indexer.{name}")
                for name in ("wq_b", "wk", "k_norm", "weights_proj")
            )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        step: LatentStep,
        prev_topk_indices: Choice | None = None,
        **_unused: object,  # transformers passes more than we need: masks, caches, flags
    ) -> tuple[Tensor, None] | tuple[Tensor, None, Choice]:
        """Attention of the packed batch, in the place and under the argument names of transformers' module.

        Args:
            hidden_states: [1, tokens, hidden size].
            position_embeddings: cosines and sines, [1, tokens, roped] each.
            step: this forward pass.
            prev_topk_indices: what the layer before returned as its choice; only layers that share read it.

        Returns:
            [1, tokens, hidden size] and no weights; in GLM's models the choice too.
        """
        sizes, hidden = self._sizes, hidden_states.squeeze(0)
        cos, sin = (table.transpose(0, 1) for table in position_embeddings)  # [tokens, 1, roped]
        resid = self._query_norm(self._query_down(hidden))
        query = self._query_up(resid).view(hidden.shape[0], -1, sizes.nope + sizes.roped)
        query, query_rope = query.split([sizes.nope, sizes.roped], dim=2)
        latent, key_rope = self._record(hidden).split([sizes.latent, sizes.roped], dim=1)
        query_rope, key_rope = (turn_pairs(part, cos, sin) for part in (query_rope, key_rope.unsqueeze(1)))
        record = torch.cat([self._latent_norm(latent), key_rope.squeeze(1)], dim=1)
        up = self._latent_up.get_parameter("weight").view(-1, sizes.nope + sizes.value, sizes.latent)
        key_up, value_up = torch.split(up, [sizes.nope, sizes.value], dim=1)  # of each head
        query = torch.cat([torch.einsum("thn,hnl->thl", query, key_up), query_rope], dim=2)
        index: IndexInput | Choice
        if self._chooses:
            index = self._index(hidden, resid, cos, sin)
        else:
            assert prev_topk_indices is not None, "a layer that shares comes behind one that chooses"
            index = prev_topk_indices
        out, choice = step.attend(self._layer, query, record, index, self._scaling)
        out = torch.einsum("thl,hvl->thv", out, value_up).flatten(1)
        projected: Tensor = self._output(out).unsqueeze(0)
        return (projected, None, choice) if self._returns_choice else (projected, None)

    def _index(self, hidden: Tensor, resid: Tensor, cos: Tensor, sin: Tensor) -> IndexInput:
        sizes = self._sizes
        query = self._index_query(resid).view(hidden.shape[0], -1, sizes.index_dim)
        key = self._index_norm(self._index_key(hidden)).unsqueeze(1)
        query, key = (
            torch.cat([self._turn(part[..., : sizes.roped], cos, sin), part[..., sizes.roped :]], dim=2)
            for part in (query, key)
        )
        weight = self._index_weight(hidden.to(self._index_weight.get_parameter("weight").dtype)).float()
        weight = weight * (query.shape[1] ** -0.5 * sizes.index_dim**-0.5)
        return IndexInput(key.squeeze(1), IndexQuery(query, weight))


def wire(model: nn.Module, model_type: str, latent: LatentSpec) -> None:
    """Put our attention into every layer of a loaded model."""
    for number, layer in enumerate(model.get_submodule("model.layers").children()):
        attention = layer.get_submodule("self_attn")
        layer.set_submodule("self_attn", LatentAttention(attention, model_type, latent, number))
