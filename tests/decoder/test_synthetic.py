"""Synthetic models have the shapes they are named for, stay finite, and are checkpoints like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from benchmarks.synthetic import (
    SHAPES,
    synthetic_config,
    synthetic_model,
    synthetic_spec,
    write_checkpoint,
)
from services.decoder.kernels.dense import TorchDense
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.models.weights import random_weights
from tests.decoder.checkpoints import COMMON
from tests.decoder.test_decode_layers import PlainStep

CPU = torch.device("cpu")
META = torch.device("meta")

PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-30b-a3b": 30_532_122_624,
}
"""Parameters, as the model cards' weights add up to."""


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_as_many_as_published(name: str) -> None:
    model = random_weights(synthetic_spec(synthetic_config(name)), torch.bfloat16, META, 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no synthetic model 'qwen9'; there are: qwen3-0\.6b, "):
        synthetic_config("qwen9")


def test_layers_can_be_fewer() -> None:
    spec, model = synthetic_model("llama-3.1-8b", META, torch.bfloat16, 2, TorchDense())
    assert spec.layers == 2
    assert model.fused
    assert synthetic_spec(synthetic_config("llama-3.1-8b", 3)).weights_digest != spec.weights_digest


def small(layers: int) -> PreTrainedConfig:
    """As wide as need be for sums to grow as in a real one, and as deep as asked."""
    wide = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "initializer_range": 0.02}
    config = AutoConfig.for_model("qwen3", **{**COMMON, **wide, "num_hidden_layers": layers})
    assert isinstance(config, PreTrainedConfig)
    return config


def test_activations_stay_finite_through_many_layers() -> None:
    spec = synthetic_spec(small(36))
    weights = random_weights(spec, torch.bfloat16, CPU, 0)
    model = CausalLM(spec, torch.bfloat16, CPU, dense=TorchDense(), model=weights)
    hidden = model.decode_hidden(torch.arange(8), torch.arange(8), PlainStep())
    assert 0.5 < float(hidden.float().std()) < 2
    assert bool(model.decode_logits(hidden).isfinite().all())


def test_a_checkpoint_is_written_that_can_be_served(tmp_path: Path, default_model: Path) -> None:
    config = small(2)
    write_checkpoint(config, tmp_path, default_model, CPU)
    spec = ModelSpec.read(tmp_path)
    assert (spec.layers, spec.head_dim, spec.eos_token_ids) == (2, 64, (2,))
    loaded = CausalLM(spec, torch.bfloat16, CPU)
    made = CausalLM(spec, torch.bfloat16, CPU, model=random_weights(spec, torch.bfloat16, CPU, 0))
    tokens, positions = [3, 1, 4, 1, 5], list(range(5))
    assert torch.equal(*(model.hidden(tokens, positions, PlainStep()) for model in (loaded, made)))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"
    assert tokenizer.decode([150000]) == "", "an id that only the model knows is no text"
