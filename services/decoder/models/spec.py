"""What a checkpoint is, read from its config: sizes, limits, and whether hotset can serve it.

Knows configs, not weights: nothing is loaded here, so a refusal costs no time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from services.contract.errors import SetupError
from services.decoder.models import nsa
from services.decoder.models.block_spec import BLOCK_TYPES, BlockSpec, block_refusal
from services.decoder.models.fp8_weights import ScaledBlock
from services.decoder.models.latent_spec import LATENT_TYPES, LatentSpec, latent_refusal

SUPPORTED = (
    "deepseek_v32",
    "glm_moe_dsa",
    "granite",
    "llama",
    "minimax_m3_vl_text",
    "mistral",
    "nsa",
    "olmo2",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Model types that are served; each is tested. But for LATENT_TYPES and BLOCK_TYPES, their attention is plain
causal GQA behind transformers' interface."""

REFUSED = {
    "deepseek_v4": "its layers keep compressed entries, half-made ones and raw windows of several lengths, "
    "and hotset keeps one record a token (docs/decisions/0017-compressed-entries.md)",
    "minimax_m3_vl": "hotset serves text only; save its language model by itself, as minimax_m3_vl_text",
}
"""Model types that somebody will try -> why they are not served."""

_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A checkpoint's sizes."""

    path: Path
    config: PreTrainedConfig
    layers: int
    query_heads: int
    kv_heads: int  # 1 where all heads share a latent record
    head_dim: int  # of a key as it is kept
    vocab_size: int
    max_positions: int  # tokens
    eos_token_ids: tuple[int, ...]
    weights_digest: bytes  # 32 bytes
    latent: LatentSpec | None = None  # of models that choose tokens by an indexer of their own
    blocks: BlockSpec | None = None  # of models that choose blocks by themselves

    @classmethod
    def read(cls, path: Path) -> ModelSpec:
        """Read `path`/config.json.

        Raises:
            SetupError: no checkpoint there, or one with a feature that would be computed wrongly.
        """
        if not (path / "config.json").is_file():
            raise SetupError(f"{path} is no Hugging Face checkpoint: it has no config.json")
        if not any(path.glob("*.safetensors")):
            raise SetupError(f"{path} has no *.safetensors; convert the weights with save_pretrained")
        config = read_config(path / "config.json")
        return cls.of_config(config, path, _eos(path, config), _digest(path))

    @classmethod
    def of_config(
        cls, config: PreTrainedConfig, path: Path, eos_token_ids: tuple[int, ...], weights_digest: bytes
    ) -> ModelSpec:
        """Sizes of a config alone; `path` is what the model is called, and need not exist.

        Raises:
            SetupError: the config has a feature that would be computed wrongly.
        """
        reason = _refusal(config)
        if reason:
            raise SetupError(f"this {config.model_type} checkpoint cannot be served: {reason}")
        heads, latent = config.num_attention_heads, LatentSpec.of(config)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            path=path,
            config=config,
            layers=config.num_hidden_layers,
            query_heads=heads,
            kv_heads=1 if latent else kv_heads,
            head_dim=latent.latent + latent.roped if latent else head_dim,
            vocab_size=config.vocab_size,
            max_positions=config.max_position_embeddings,
            eos_token_ids=eos_token_ids,
            weights_digest=weights_digest,
            latent=latent,
            blocks=BlockSpec.of(config),
        )


def read_config(file: Path) -> PreTrainedConfig:
    """A checkpoint's config, of a supported model type.

    Raises:
        SetupError: it cannot be read, is not JSON, or of no model type that is served.
    """
    found = raw_config(file)
    nsa.register()
    try:
        config = AutoConfig.from_pretrained(file, local_files_only=True)
    except Exception as error:  # transformers checks fields with errors of many kinds
        raise SetupError(f"transformers refuses {file}: {error}") from error
    assert isinstance(config, PreTrainedConfig)
    assert config.model_type == found["model_type"]
    return config


def raw_config(file: Path) -> dict[str, Any]:
    """The fields of a config.json as they stand there; errors as of `read_config`."""
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise SetupError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SetupError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise SetupError(f"{file} is not JSON of a model's config: it holds no object")
    model_type = found.get("model_type")
    if model_type in REFUSED:
        raise SetupError(f"model type {model_type!r} is not served: {REFUSED[model_type]}")
    if model_type not in SUPPORTED:
        raise SetupError(f"model type {model_type!r} is not supported; supported: {', '.join(SUPPORTED)}")
    return found


def _refusal(config: PreTrainedConfig) -> str | None:
    """Why attention over hot slots would not be this model's attention; None if it is."""
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads and heads % kv_heads:
        return f"its {heads} query heads cannot share {kv_heads} KV heads evenly"
    served = "indexed_attention" if config.model_type in LATENT_TYPES else "full_attention"
    layer_types = set(getattr(config, "layer_types", None) or [served])
    if config.model_type in LATENT_TYPES:
        layer_types.discard("deepseek_sparse_attention")  # the name in transformers 5.17
    if not layer_types <= {served} and config.model_type not in BLOCK_TYPES:
        return f"layers of types {sorted(layer_types)}; only {served} is served"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "it attends through a sliding window"
    for name in ("attn_logit_softcapping", "attention_chunk_size"):
        if getattr(config, name, None):
            return f"it uses {name}"
    if getattr(config, "quantization_config", None) and ScaledBlock.of(config) is None:
        return "its weights are quantised; save them dequantised"
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its {rope['rope_type']} rope changes with the length, so cached keys would go stale"
    if config.model_type in BLOCK_TYPES:
        return block_refusal(config)
    return latent_refusal(config) if config.model_type in LATENT_TYPES else None


def _eos(path: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json's, else the config's."""
    source = path / "generation_config.json"
    found = json.loads(source.read_text()).get("eos_token_id") if source.is_file() else None
    if found is None:
        found = config.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


def _digest(path: Path) -> bytes:
    """A hash of the config and of each weights file's length, head and tail: quick, and changes with them."""
    digest = hashlib.blake2b((path / "config.json").read_bytes(), digest_size=32)
    for weights in sorted(path.glob("*.safetensors")):
        size = weights.stat().st_size
        digest.update(f"{weights.name}:{size}".encode())
        with weights.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
