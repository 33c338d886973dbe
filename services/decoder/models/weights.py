"""Where a model's weights come from: a checkpoint, or a random generator for benchmarks.

Knows transformers' model classes and our attention's name; not what is computed with them.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from services.contract.errors import SetupError
from services.decoder.models.attention_hook import ATTENTION_NAME, register
from services.decoder.models.fp8_weights import ScaledBlock, read_weights
from services.decoder.models.spec import ModelSpec


def load_weights(spec: ModelSpec, dtype: torch.dtype) -> nn.Module:
    """The checkpoint's model, on the CPU.

    Raises:
        SetupError: some weights are not there, which transformers would make up, or FP8 ones lack factors.
    """
    register()
    block = ScaledBlock.of(spec.config)
    loaded: object
    if block is None:
        loaded = AutoModelForCausalLM.from_pretrained(
            spec.path,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
        )
    else:
        config = copy.deepcopy(spec.config)
        del config.quantization_config  # transformers would want a GPU for it, and another library
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        assert isinstance(kind, type)
        assert issubclass(kind, PreTrainedModel)
        loaded = kind.from_pretrained(
            None,
            config=config,
            state_dict=_dequantised(spec.path, block, dtype),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    assert isinstance(loaded, tuple), "asked for with output_loading_info"
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise SetupError(
            f"the checkpoint {spec.path} lacks {len(missing)} weights, {missing[0]} among them; "
            "copy or convert it anew"
        )
    assert isinstance(model, nn.Module)
    return model


def _dequantised(path: Path, block: ScaledBlock, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        return read_weights(path, block, dtype)
    except (OSError, ValueError) as error:
        raise SetupError(f"the FP8 weights of {path} cannot be read: {error}") from error


def random_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
    """A model of the config's shapes, made on `device`; the same one for the same seed, device and dtype.

    Matrices are normal with the config's `initializer_range`, norms are ones, as transformers starts a
    training. The process's random generators are left as they were.
    """
    register()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
            spec.config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    assert isinstance(model, nn.Module)
    return model
