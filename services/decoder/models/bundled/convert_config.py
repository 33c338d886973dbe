"""config.json, generation_config.json and chat_template.jinja from the GGUF's metadata.

Knows the names that Hugging Face gives to what GGUF's `llama.*` keys say; no tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader


def metadata(reader: GGUFReader, key: str) -> Any:
    """The value of a metadata key: int, float, bool, str or a list of them.

    Raises:
        KeyError: the file has no such key.
    """
    return reader.fields[key].contents()


def write_config(reader: GGUFReader, target: Path) -> None:
    """Write the three files into the directory `target`.

    Raises:
        KeyError: the GGUF lacks a key of a llama model.
        OSError: a file cannot be written.
    """
    heads = metadata(reader, "llama.attention.head_count")
    special_ids = {
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata(reader, "tokenizer.ggml.padding_token_id"),
    }
    config = special_ids | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "float32",
        "head_dim": metadata(reader, "llama.rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": metadata(reader, "llama.embedding_length"),
        "intermediate_size": metadata(reader, "llama.feed_forward_length"),
        "max_position_embeddings": metadata(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": metadata(reader, "llama.block_count"),
        "num_key_value_heads": metadata(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": _as_written(metadata(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": metadata(reader, "llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "vocab_size": metadata(reader, "llama.vocab_size"),
    }
    write_json(target / "config.json", config)
    write_json(target / "generation_config.json", special_ids)
    (target / "chat_template.jinja").write_text(metadata(reader, "tokenizer.chat_template"), encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write `value` as people read it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _as_written(value: float) -> float:
    """The short decimal that a float32 was written as: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
