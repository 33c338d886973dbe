"""Models of real shapes with random weights: for machines that reach no hub, and benchmarks.

    python -m benchmarks.synthetic qwen3-8b [--layers N] [--device cuda:0] [--out DIR [--tokenizer DIR]]

Without `--out` the model is made on the device, counted and dropped. With it, a checkpoint is written that
the server loads as any other. Its tokenizer is the bundled model's: text goes in and, of a kind, comes out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from services.decoder.kernels.dense import DenseOps
from services.decoder.models.bundled.directory import default_model
from services.decoder.models.causal_lm import CausalLM, resolve_device
from services.decoder.models.spec import ModelSpec
from services.decoder.models.weights import random_weights

_QWEN3: Mapping[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "use_sliding_window": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

SHAPES: Mapping[str, Mapping[str, object]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    },
}
"""Name -> the sizes in the config.json of Qwen/Qwen3-0.6B, Qwen/Qwen3-8B, meta-llama/Llama-3.1-8B and
Qwen/Qwen3-30B-A3B on Hugging Face; a test compares the parameter counts with the published ones."""

_SEED = 0
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def synthetic_config(name: str, layers: int = 0) -> PreTrainedConfig:
    """The config of that name; with `layers` layers if not 0.

    Raises:
        ValueError: no such name.
    """
    if name not in SHAPES:
        raise ValueError(f"no synthetic model {name!r}; there are: {', '.join(SHAPES)}")
    fields = {**SHAPES[name], "initializer_range": 0.02, "dtype": "bfloat16"}
    model_type = str(fields.pop("model_type"))
    if layers:
        fields["num_hidden_layers"] = layers
    config = AutoConfig.for_model(model_type, **fields)
    assert isinstance(config, PreTrainedConfig)
    return config


def synthetic_spec(config: PreTrainedConfig) -> ModelSpec:
    """A spec without files."""
    digest = hashlib.blake2b(f"{_SEED}{config.to_json_string()}".encode(), digest_size=32).digest()
    return ModelSpec.of_config(config, Path("synthetic"), (int(config.eos_token_id),), digest)


def synthetic_model(
    name: str, device: torch.device, dtype: torch.dtype, layers: int = 0, dense: DenseOps | None = None
) -> tuple[ModelSpec, CausalLM]:
    """A model of that name with random weights, made on the device.

    Args:
        name: a key of SHAPES.
        device: where.
        dtype: of weights and computation.
        layers: instead of the real number, if not 0.
        dense: as CausalLM takes it.

    Raises:
        ValueError: no such name.
    """
    spec = synthetic_spec(synthetic_config(name, layers))
    model = random_weights(spec, dtype, device, _SEED)
    return spec, CausalLM(spec, dtype, device, dense=dense, model=model)


def write_checkpoint(config: PreTrainedConfig, out: Path, tokenizer: Path, device: torch.device) -> None:
    """Write config.json, sharded bfloat16 weights and another checkpoint's BPE tokenizer into `out`."""
    model = random_weights(synthetic_spec(config), torch.bfloat16, device, _SEED)
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(out, max_shard_size="4GB")
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, out / name)
    if (out / "tokenizer.json").is_file():
        _name_every_id(out / "tokenizer.json", config.vocab_size)


def _name_every_id(path: Path, vocab_size: int) -> None:
    """Give ids that a smaller vocabulary lacks a text of their own, so that every token drawn is seen."""
    told = json.loads(path.read_text())
    vocabulary = told["model"]["vocab"]
    known = {*vocabulary.values(), *(token["id"] for token in told["added_tokens"])}
    vocabulary |= {f"\u0120id{number}": number for number in range(vocab_size) if number not in known}
    path.write_text(json.dumps(told))


def main() -> None:
    """Make what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's own number")
    parser.add_argument("--device", default="auto", help="where the weights are drawn")
    parser.add_argument("--out", type=Path, help="write a checkpoint into this directory")
    parser.add_argument("--tokenizer", type=Path, help="directory of a tokenizer to copy; default: bundled")
    wanted = parser.parse_args()
    device = resolve_device(wanted.device)
    began = time.monotonic()
    if wanted.out:
        config = synthetic_config(wanted.name, wanted.layers)
        write_checkpoint(config, wanted.out, wanted.tokenizer or default_model(), device)
        size = sum(file.stat().st_size for file in wanted.out.glob("*.safetensors"))
        print(f"{wanted.out}: {size / 1e9:.2f} GB of weights in {time.monotonic() - began:.1f} s")
    else:
        _, model = synthetic_model(wanted.name, device, torch.bfloat16, wanted.layers)
        size = model.weight_bytes
        print(
            f"{wanted.name} on {device}: {size / 1e9:.2f} GB of weights in {time.monotonic() - began:.1f} s"
        )


if __name__ == "__main__":
    main()
