"""Tiny random checkpoints of every architecture that is served, saved as transformers saves them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.decoder.models import nsa
from services.decoder.models.block_spec import BLOCK_TYPES
from services.decoder.models.latent_spec import LATENT_TYPES
from services.decoder.models.spec import SUPPORTED

COMMON: Mapping[str, object] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.3,  # so that answers differ from one another
}

_LATENT: Mapping[str, object] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "index_head_dim": 32,
    "index_n_heads": 32,  # with few, relu leaves many scores at exactly 0, and ties decide
    "index_topk": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "pad_token_id": None,  # whose embedding is zero, and so is every score of such a token
    "head_dim": None,
}

GQA_TYPES = tuple(name for name in SUPPORTED if name not in (*LATENT_TYPES, *BLOCK_TYPES))

TWISTS: Mapping[str, Mapping[str, object]] = {
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "granite": {
        "attention_multiplier": 0.11,
        "residual_multiplier": 0.6,
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.0,
        "head_dim": None,
        "hidden_size": 96,
    },
    "llama": {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 8,
        "index_topk_blocks": 5,
        "pad_token_id": None,
    },
    "mistral": {"sliding_window": None},
    "nsa": {"nsa_block_tokens": 8, "nsa_top_k": 5, "nsa_compress_tokens": 4, "nsa_window_tokens": 11},
    "olmo2": {"head_dim": None, "hidden_size": 96},
    "qwen2": {"head_dim": None, "hidden_size": 96, "use_sliding_window": False},
    "qwen3": {"head_dim": 32, "use_sliding_window": False},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "use_sliding_window": False,
    },
    "smollm3": {"head_dim": None, "hidden_size": 96, "no_rope_layers": [1, 0, 1]},
}
"""Model type -> what makes it unlike Llama, and so could be got wrong."""


def save(path: Path, model_type: str, **changes: object) -> Path:
    """Save a checkpoint of `model_type` in `path`, always the same one."""
    nsa.register()
    wanted = {**COMMON, **TWISTS.get(model_type, {}), **changes}
    config = AutoConfig.for_model(
        model_type,
        **{name: value for name, value in wanted.items() if value is not None or name != "head_dim"},
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    if model_type in (*LATENT_TYPES, *BLOCK_TYPES):
        for name, parameter in model.named_parameters():
            # Biases begin as zeros, norms as ones and these weights as a mean, which would hide them.
            if parameter.dim() == 1 or name.endswith("compress_weights"):
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path
