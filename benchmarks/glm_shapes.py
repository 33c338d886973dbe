"""One GPU's share of GLM-5.1 and GLM-5.2 on eight: a slice of their layers, and what memory it may use.

Knows configs and bytes, nothing of engines. The deployment that is sliced keeps every attention layer on
every GPU and deals the experts out, weights in FP8; what is left of a GPU holds KV. A slice of 12 of the 78
layers gets 12/78 of that, so a row costs it the same share as it costs the deployment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import AutoConfig, PreTrainedConfig

from services.decoder.kernels.index_code import TAIL_BYTES
from services.decoder.kernels.record_code import coded_bytes

LAYERS, WHOLE_LAYERS, RANKS = 12, 78, 8
MEMORY_SHARE = 0.94
"""Of a GPU's memory that such a deployment plans with. On an H200 34 GB are left for KV then; the paper's
baseline, eight GPUs, is full with 240 GB."""

_GLM: Mapping[str, object] = {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "first_k_dense_replace": 3,
    "num_hidden_layers": WHOLE_LAYERS,
    "initializer_range": 0.02,
    "pad_token_id": None,
    "dtype": "bfloat16",
}

SHARING: Mapping[str, Mapping[str, object]] = {
    "glm-5.1": {},
    "glm-5.2": {"index_topk_freq": 4, "index_skip_topk_offset": 3},
}
"""Model -> which of its layers choose: all, or 21 of 78."""


def whole_config(name: str) -> PreTrainedConfig:
    """Of the whole model.

    Raises:
        ValueError: no such name.
    """
    if name not in SHARING:
        raise ValueError(f"no slice of {name!r}; there are: {', '.join(SHARING)}")
    return _config({**_GLM, **SHARING[name]})


def slice_config(name: str, **changes: object) -> PreTrainedConfig:
    """Of the slice; `changes` make it smaller still, for tests.

    The three dense layers of 78 are none of 12; a third of a quarter of the layers that choose would be lost,
    so the slice begins with one that does. Embedding and head are this GPU's and these layers' share.
    """
    whole = whole_config(name)
    vocabulary = whole.vocab_size // RANKS * LAYERS // WHOLE_LAYERS // 64 * 64
    sliced: dict[str, object] = {
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": 0,
        "n_routed_experts": whole.n_routed_experts // RANKS,
        "vocab_size": vocabulary,
    }
    if SHARING[name]:
        sliced["index_skip_topk_offset"] = 1  # 3 of 12 layers, near 21 of 78; with 3 it would be 5
    return _config({**_GLM, **SHARING[name], **sliced, **changes})


def _config(fields: Mapping[str, object]) -> PreTrainedConfig:
    config = AutoConfig.for_model("glm_moe_dsa", **fields)
    assert isinstance(config, PreTrainedConfig)
    return config


def rank_weight_bytes(config: PreTrainedConfig) -> int:
    """Weights of a whole model on one of RANKS GPUs: FP8, but for embedding and head."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    attention = (
        hidden * config.q_lora_rank
        + config.q_lora_rank * heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        + hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
        + config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        + heads * config.v_head_dim * hidden
    )
    indexer = (
        config.q_lora_rank * config.index_n_heads * config.index_head_dim + hidden * config.index_head_dim
    )
    choosing = list(config.indexer_types).count("full")
    expert = 3 * hidden * config.moe_intermediate_size
    sparse = list(config.mlp_layer_types).count("sparse")
    dense = config.num_hidden_layers - sparse
    experts = sparse * (config.n_routed_experts // RANKS + config.n_shared_experts) * expert
    embedding = 2 * 2 * config.vocab_size * hidden // RANKS
    layers = attention * config.num_hidden_layers + indexer * choosing
    return int(layers + experts + dense * 3 * hidden * config.intermediate_size + embedding)


@dataclass(frozen=True, slots=True)
class SliceMemory:
    """What a slice has for KV, and what rows of one length take of it."""

    kv_bytes: int
    tokens: int  # of a row at its longest, in whole pages
    record_bytes: int  # of a token, all layers of the slice
    index_bytes: int  # likewise, of the layers that choose
    table_bytes: int  # of a token in tiered mode: where each lies
    slot_bytes: int  # of a hot slot, all layers, tables included

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        whole: PreTrainedConfig,
        memory: int,
        tokens: int,
        *,
        itemsize: int = 2,
        coded: bool = False,
        records_coded: bool = False,
    ) -> SliceMemory:
        """For a slice `config` of `whole` on a GPU of `memory` bytes; index keys in eight bits if `coded`,
        records if `records_coded`.
        """
        left = int(memory * MEMORY_SHARE) - rank_weight_bytes(whole)
        layers, choosing = config.num_hidden_layers, list(config.indexer_types).count("full")
        dim = config.index_head_dim
        latent, roped = config.kv_lora_rank, config.qk_rope_head_dim
        record = layers * (coded_bytes(latent, roped) if records_coded else (latent + roped) * itemsize)
        return cls(
            kv_bytes=left * layers // whole.num_hidden_layers,
            tokens=tokens,
            record_bytes=record,
            index_bytes=choosing * (dim + TAIL_BYTES if coded else dim * itemsize),
            table_bytes=4 * choosing,
            slot_bytes=record + 8 * choosing,
        )

    @property
    def full_rows(self) -> int:
        """Rows that fit with everything on the device."""
        return self.kv_bytes // (self.tokens * (self.record_bytes + self.index_bytes))

    def tiered_rows(self, slots: int) -> int:
        """Rows that fit with so many hot slots each."""
        return self.kv_bytes // (self.resident_bytes + slots * self.slot_bytes)

    @property
    def resident_bytes(self) -> int:
        """Of a row, beside its hot slots, in tiered mode."""
        return self.tokens * (self.index_bytes + self.table_bytes)

    def elastic_bytes(self, rows: int) -> int:
        """What `rows` rows may share as hot slots, tables included."""
        return self.kv_bytes - rows * self.resident_bytes


def levels(most: int, others: tuple[int, ...] = ()) -> list[int]:
    """Concurrencies to measure, the most first: powers of two, `others`, and the limit itself."""
    wanted = {most, *others}
    at = 1
    while at < most:
        wanted.add(at)
        at *= 2
    return sorted((level for level in wanted if 0 < level <= most), reverse=True)
