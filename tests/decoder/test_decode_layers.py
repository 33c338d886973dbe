"""The fused layers compute what transformers' layers compute, on the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.decoder.attention.step import Step
from services.decoder.kernels.attend_part import attend_part
from services.decoder.kernels.dense import TorchDense
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.decode_layers import FUSABLE, DecodeLayers, fusable
from services.decoder.models.fused_weights import FusedWeights
from services.decoder.models.spec import ModelSpec
from services.decoder.models.weights import load_weights, random_weights
from tests.decoder import checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TOKENS = torch.tensor([5, 200, 17, 17, 3, 88, 140])
POSITIONS = torch.arange(300, 307)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}


class PlainStep(Step):
    """A step whose attention is dense and causal over the packed tokens."""

    def __init__(self) -> None:  # no heart, no rows
        pass

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return attend_part(query, key, value, scaling, causal=True).out


class StubStep(PlainStep):
    """One whose attention hands the query back."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return query


def save(path: Path, model_type: str, **changes: object) -> Path:
    """A checkpoint whose norms and biases are not the ones and zeros of a start, which hide mistakes."""
    checkpoints.save(path, model_type, **changes)
    weights = load_file(path / "model.safetensors")
    draw = torch.Generator().manual_seed(5)
    for name in sorted(weights):
        if weights[name].dim() == 1:
            weights[name] += 0.3 * torch.randn(weights[name].shape, generator=draw)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def theirs(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Hidden states and logits as transformers computes them with its own attention."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        hidden = model.model(TOKENS[None], position_ids=POSITIONS[None], use_cache=False).last_hidden_state
        return hidden[0], model(TOKENS[None], position_ids=POSITIONS[None], use_cache=False).logits[0].float()


def off(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


CHECKPOINTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    **{name: (name, {}) for name in FUSABLE},
    "llama without biases, own head": ("llama", {"attention_bias": False, "tie_word_embeddings": False}),
    "llama, one query head a KV head": ("llama", {"num_key_value_heads": 6}),
    "qwen3, tied head": ("qwen3", {"tie_word_embeddings": True}),
    "yarn scales the attention": ("qwen3", {"rope_parameters": YARN}),
    "llama 3's rope": ("llama", {"rope_parameters": LLAMA3}),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_fused_layers_equal_transformers(tmp_path: Path, name: str) -> None:
    model_type, changes = CHECKPOINTS[name]
    path = save(tmp_path, model_type, **changes)
    hidden, logits = theirs(path)
    model = CausalLM(ModelSpec.read(path), torch.float32, CPU, dense=TorchDense())
    assert model.fused
    for integers in (torch.int32, torch.int64):
        got = model.decode_hidden(TOKENS.to(integers), POSITIONS.to(integers), PlainStep())
        assert off(got, hidden) < 1e-5
        assert off(model.decode_logits(got), logits) < 1e-5
    prefilled = model.hidden(TOKENS.tolist(), POSITIONS.tolist(), PlainStep())
    assert off(prefilled, hidden) < 1e-5, "transformers' own layers no longer work on the fused weights"
    assert off(model.logits(prefilled), logits) < 1e-5


def test_in_bfloat16_they_differ_by_rounding(tmp_path: Path) -> None:
    path = save(tmp_path, "qwen3")
    hidden, _ = theirs(path, torch.bfloat16)
    model = CausalLM(ModelSpec.read(path), torch.bfloat16, CPU, dense=TorchDense())
    got = model.decode_hidden(TOKENS, POSITIONS, PlainStep())
    assert got.dtype == torch.bfloat16
    assert off(got.float(), hidden.float()) < 0.02


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """Address -> bytes of what the tensors lie in."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("model_type", FUSABLE)
def test_fusing_takes_no_memory(tmp_path: Path, model_type: str) -> None:
    """All parameters lie in the fused tensors, and those are as large as the parameters."""
    spec = ModelSpec.read(save(tmp_path, model_type))
    model = load_weights(spec, torch.float32)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    tables = 2 * spec.max_positions * spec.head_dim * 4 * (2 if model_type == "smollm3" else 1)
    layers = DecodeLayers(model, spec.config, TorchDense())
    parameters: list[Tensor] = list(model.parameters())
    held = storages(parameters)
    assert sum(held.values()) == size
    assert sum(storages(parameters + tensors_of(layers)).values()) == size + tables
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    first = model.get_submodule("model.layers.1.self_attn")
    addresses = [first.get_parameter(f"{name}_proj.weight").untyped_storage().data_ptr() for name in "qkv"]
    assert len(set(addresses)) == 1


def tensors_of(thing: object) -> list[Tensor]:
    """Every tensor that an object of this project holds."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, list | tuple):
        return [tensor for part in thing for tensor in tensors_of(part)]
    if not type(thing).__module__.startswith("services."):
        return []
    names = getattr(thing, "__slots__", None) or vars(thing)
    return [tensor for name in names for tensor in tensors_of(getattr(thing, name))]


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_fused_model_is_saved_as_it_was(tmp_path: Path, model_type: str) -> None:
    path = save(tmp_path / "before", model_type)
    spec = ModelSpec.read(path)
    model = load_weights(spec, torch.float32)
    DecodeLayers(model, spec.config, TorchDense())
    model.save_pretrained(tmp_path / "after")  # type: ignore[operator]  # a PreTrainedModel, typed as a module
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("model_type", checkpoints.GQA_TYPES)
def test_no_value_is_read_by_the_host(tmp_path: Path, model_type: str) -> None:
    """On the meta device there are no values to read: `.item()` and branches on a tensor raise there."""
    meta = torch.device("meta")
    spec = ModelSpec.read(save(tmp_path, model_type))
    weights = random_weights(spec, torch.bfloat16, meta, 0)
    model = CausalLM(spec, torch.bfloat16, meta, dense=TorchDense(), model=weights)
    assert model.fused == (model_type in FUSABLE)
    hidden = model.decode_hidden(TOKENS.to(meta), POSITIONS.to(meta), StubStep())
    assert hidden.shape == (7, spec.config.hidden_size)
    assert model.decode_logits(hidden).shape == (7, spec.vocab_size)


NOT_FUSABLE: Mapping[str, tuple[str, Mapping[str, object]]] = {
    **{name: (name, {}) for name in checkpoints.GQA_TYPES if name not in FUSABLE},
    "biases in the MLP": ("llama", {"mlp_bias": True}),
    "another gate": ("qwen2", {"hidden_act": "gelu"}),
}


@pytest.mark.parametrize("name", NOT_FUSABLE)
def test_other_models_keep_transformers_layers(tmp_path: Path, name: str) -> None:
    model_type, changes = NOT_FUSABLE[name]
    path = save(tmp_path, model_type, **changes)
    spec = ModelSpec.read(path)
    assert not fusable(spec.config)
    with pytest.raises(ValueError, match=f"a {model_type} model of this config has no fused decode layers"):
        DecodeLayers(load_weights(spec, torch.float32), spec.config, TorchDense())
    model = CausalLM(spec, torch.float32, CPU, dense=TorchDense())
    assert not model.fused
    hidden, logits = theirs(path)
    got = model.decode_hidden(TOKENS, POSITIONS, PlainStep())
    assert off(got, hidden) < 1e-5
    assert off(model.decode_logits(got), logits) < 1e-5


def test_without_dense_ops_nothing_is_fused(tmp_path: Path) -> None:
    model = CausalLM(ModelSpec.read(save(tmp_path, "llama")), torch.float32, CPU)
    assert not model.fused


def test_half_a_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="with and without a bias"):
        FusedWeights.of([nn.Linear(3, 2), nn.Linear(3, 2, bias=False)])


def test_random_weights_come_back_with_their_seed(tmp_path: Path) -> None:
    spec = ModelSpec.read(checkpoints.save(tmp_path, "qwen3", initializer_range=0.02))
    state = torch.random.get_rng_state()
    first, again, other = (
        dict(random_weights(spec, torch.float32, CPU, seed).named_parameters()) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.random.get_rng_state(), state), "the process's generator was moved"
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.2.mlp.down_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert float(first[name].detach().std()) == pytest.approx(0.02, rel=0.1)
    assert bool((first["model.layers.0.self_attn.q_norm.weight"] == 1).all())
