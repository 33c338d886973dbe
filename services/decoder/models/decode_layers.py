"""A decoder's layers walked anew: fused projections, and nothing that a CUDA graph could not hold.

Knows how pre-norm RMSNorm GQA decoders are wired; not who attends, nor how a product is computed. The
weights are transformers' own: its modules keep working on them. Prefill walks here too: in transformers'
layers a quarter of its time goes into what lies between the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from services.decoder.kernels.dense import DenseOps
from services.decoder.models.fused_weights import FusedWeights

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, query [R, heads, D], key [R, kv_heads, D], value like key, scaling) -> [R, heads, D]."""

FUSABLE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Model types that are wired as `DecodeLayers.hidden` walks them. Granite scales its residuals, OLMo 2 norms
behind its sublayers, Qwen3-MoE routes."""


def fusable(config: PreTrainedConfig) -> bool:
    """Whether `DecodeLayers` computes this model; if not, transformers' own layers do."""
    return (
        config.model_type in FUSABLE
        and config.hidden_act == "silu"
        and not getattr(config, "mlp_bias", False)  # of llama and smollm3; DenseOps.gated adds none
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights; `next_norm` is the following layer's first norm, or the model's last."""

    qkv: FusedWeights  # [(heads + 2 kv_heads) * D, H]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    cos: Tensor  # [positions, D]
    sin: Tensor  # [positions, D]
    scaling: float  # of q.k
    output: FusedWeights  # [H, heads * D]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2F, H], the gate's rows first
    down: Tensor  # [H, F]
    next_norm: Tensor  # [H]


class DecodeLayers:
    """The layers of one loaded model. All methods are device work alone: no value is read by the host."""

    def __init__(self, model: nn.Module, config: PreTrainedConfig, dense: DenseOps) -> None:
        """Fuse the weights of `model`, a causal LM on its device; its parameters become views of them.

        Raises:
            ValueError: the model is not `fusable`.
        """
        if not fusable(config):
            raise ValueError(f"a {config.model_type} model of this config has no fused decode layers")
        self._dense = dense
        self._heads = config.num_attention_heads
        self._kv_heads = getattr(config, "num_key_value_heads", None) or self._heads
        self._eps = float(config.rms_norm_eps)
        self._embedding = model.get_parameter("model.embed_tokens.weight").detach()  # [vocab, H]
        self._head = model.get_parameter("lm_head.weight").detach()  # [vocab, H]; the embedding's if tied
        layers = list(model.get_submodule("model.layers").children())
        norms = [layer.get_parameter("input_layernorm.weight").detach() for layer in layers]
        norms.append(model.get_parameter("model.norm.weight").detach())
        self._first_norm = norms[0]
        cos, sin = _rope_tables(model, config, self._embedding)
        still = (torch.ones_like(cos), torch.zeros_like(sin)) if config.model_type == "smollm3" else None
        self._layers = []
        for number, layer in enumerate(layers):
            turns = still is None or config.no_rope_layers[number]  # which lists the layers with rope as 1
            tables = (cos, sin) if turns or still is None else still
            self._layers.append(_read_layer(layer, *tables, norms[number + 1]))

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """`walk` to its end."""
        for normed in self.walk(tokens, positions, attend):
            hidden = normed
        return hidden

    def walk(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Iterator[Tensor]:
        """One token a row through all layers, one by one: rows that decode, and the tokens of prompts.

        Args:
            tokens: [R] int32 or int64 ids.
            positions: [R] int32 or int64, each below the model's most positions.
            attend: the step's attention.

        Yields:
            After each layer, [R, H] behind the norm that follows it; of the last layer, the model's.
        """
        dense, eps = self._dense, self._eps
        residual = nn.functional.embedding(tokens, self._embedding)
        normed = dense.norm(residual, self._first_norm, eps)
        for number, layer in enumerate(self._layers):
            qkv = dense.linear(normed, layer.qkv.weight, layer.qkv.bias)
            query, key, value = dense.rotate(
                qkv,
                layer.cos,
                layer.sin,
                positions,
                self._heads,
                self._kv_heads,
                layer.q_norm,
                layer.k_norm,
                eps,
            )
            attended = attend(number, query, key, value, layer.scaling).flatten(1)
            delta = dense.linear(attended, layer.output.weight, layer.output.bias)
            residual, normed = dense.add_norm(residual, delta, layer.mlp_norm, eps)
            delta = dense.linear(dense.gated(normed, layer.gate_up), layer.down, None)
            residual, normed = dense.add_norm(residual, delta, layer.next_norm, eps)
            yield normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, vocab] in the model's dtype."""
        return self._dense.linear(hidden, self._head, None)


def _rope_tables(model: nn.Module, config: PreTrainedConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, each [positions, D], by the model's own module, in its dtype."""
    positions = torch.arange(config.max_position_embeddings, device=like.device).unsqueeze(0)
    with torch.no_grad():
        cos, sin = model.get_submodule("model.rotary_emb")(like, positions)
    return cos.squeeze(0), sin.squeeze(0)


def _read_layer(layer: nn.Module, cos: Tensor, sin: Tensor, next_norm: Tensor) -> _Layer:
    attention = layer.get_submodule("self_attn")
    norms = dict(attention.named_parameters())
    q_norm, k_norm = (norms.get(name) for name in ("q_norm.weight", "k_norm.weight"))
    scaling = attention.scaling
    assert isinstance(scaling, float)
    return _Layer(
        qkv=_fuse(attention, "q_proj", "k_proj", "v_proj"),
        q_norm=None if q_norm is None else q_norm.detach(),
        k_norm=None if k_norm is None else k_norm.detach(),
        cos=cos,
        sin=sin,
        scaling=scaling,
        output=_fuse(attention, "o_proj"),
        mlp_norm=layer.get_parameter("post_attention_layernorm.weight").detach(),
        gate_up=_fuse(layer, "mlp.gate_proj", "mlp.up_proj").weight,
        down=_fuse(layer, "mlp.down_proj").weight,
        next_norm=next_norm,
    )


def _fuse(parent: nn.Module, *names: str) -> FusedWeights:
    modules = [parent.get_submodule(name) for name in names]
    assert all(isinstance(module, nn.Linear) for module in modules)
    return FusedWeights.of([module for module in modules if isinstance(module, nn.Linear)])
