"""The sizes of a model with latent records and an indexer, read from its config.

Knows configs of `deepseek_v32` and `glm_moe_dsa`, not weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

LATENT_TYPES = ("deepseek_v32", "glm_moe_dsa")
"""Model types with MLA and DSA; each is tested."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Numbers of a head or a record, unless it says otherwise."""

    latent: int  # of a record, shared by all heads
    roped: int  # of a record and of a query head, beside the latent ones
    nope: int  # of a query head before it is absorbed, without the roped ones
    value: int  # of a head's output
    index_dim: int  # of an index key
    top_k: int  # tokens that an indexer chooses
    anchors: tuple[int, ...]  # by layer, the one whose choice it follows; its own number where it chooses

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LatentSpec | None:
        """The sizes; None for a model that keeps keys and values."""
        if config.model_type not in LATENT_TYPES:
            return None
        anchors: list[int] = []
        for layer, kind in enumerate(_indexers(config)):
            anchors.append(anchors[-1] if kind == "shared" and anchors else layer)
        return cls(
            latent=config.kv_lora_rank,
            roped=config.qk_rope_head_dim,
            nope=config.qk_nope_head_dim,
            value=config.v_head_dim,
            index_dim=config.index_head_dim,
            top_k=config.index_topk,
            anchors=tuple(anchors),
        )


def latent_refusal(config: PreTrainedConfig) -> str | None:
    """Why a config of LATENT_TYPES would be computed wrongly; None if it would not."""
    indexers = _indexers(config)
    if len(indexers) != config.num_hidden_layers or not set(indexers) <= {"full", "shared"}:
        return f"indexer_types must name {config.num_hidden_layers} layers full or shared: {indexers}"
    if indexers[0] == "shared":
        return "its first layer shares a choice that no layer before it makes"
    if config.index_head_dim < config.qk_rope_head_dim:
        return f"its index keys of {config.index_head_dim} numbers are shorter than their rope"
    return None


def _indexers(config: PreTrainedConfig) -> list[str]:
    """By layer, `full` or `shared`."""
    return list(getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers)
