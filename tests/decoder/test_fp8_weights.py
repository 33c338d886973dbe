"""Checkpoints in FP8 with a scale a block are served as their dequantised selves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.contract.errors import SetupError
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.fp8_weights import ScaledBlock, dequantise
from services.decoder.models.spec import ModelSpec
from services.decoder.models.weights import load_weights
from tests.decoder import checkpoints

CPU = torch.device("cpu")
BLOCK = ScaledBlock(32, 24)
"""Divides few of the tiny models' sizes."""
KEPT = ("embed_tokens", "lm_head", "weights_proj", "gate.weight", "norm")


def quantise(path: Path) -> dict[str, Tensor]:
    """Save a checkpoint's projections in FP8, in two files; returns what they stand for."""
    file = path / "model.safetensors"
    saved, meant = load_file(file), {}
    for name, weight in list(saved.items()):
        if weight.dim() != 2 or any(part in name for part in KEPT):
            continue
        rows, columns = weight.shape
        factors = torch.rand(-(-rows // BLOCK.rows), -(-columns // BLOCK.columns)) * 0.01 + 0.001
        each = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                each[row, column] = factors[row // BLOCK.rows, column // BLOCK.columns]
        saved[name] = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        saved[f"{name}_scale_inv"] = factors
        meant[name] = saved[name].float() * each
    names = sorted(saved)
    parts = {"model-1.safetensors": names[0::2], "model-2.safetensors": names[1::2]}
    for part, own in parts.items():
        save_file({name: saved[name] for name in own}, path / part, {"format": "pt"})
    file.unlink()
    save_file({names[0]: torch.zeros(1)}, path / "consolidated.safetensors", {"format": "pt"})  # not named
    weight_map = {name: part for part, own in parts.items() for name in own}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (path / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_what_they_stand_for(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    """Experts too, which transformers joins while it loads."""
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    checkpoints.save(plain, model_type)
    meant = quantise(checkpoints.save(quantised, model_type))
    weights = load_file(plain / "model.safetensors")
    assert len(meant) > 10
    assert any(not torch.equal(weights[name], value) for name, value in meant.items())
    save_file(weights | meant, plain / "model.safetensors", {"format": "pt"})
    expected, found = (load_weights(ModelSpec.read(path), dtype) for path in (plain, quantised))
    pairs = zip(expected.named_parameters(), found.named_parameters(), strict=True)
    for (name, one), (_, other) in pairs:
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    CausalLM(ModelSpec.read(quantised), dtype, CPU, model=found)


def test_factors_that_are_missing_are_missed(tmp_path: Path) -> None:
    quantise(checkpoints.save(tmp_path, "qwen3"))
    lost = "model.layers.1.mlp.up_proj.weight_scale_inv"
    [file] = [path for path in tmp_path.glob("model-*.safetensors") if lost in load_file(path)]
    save_file({name: value for name, value in load_file(file).items() if name != lost}, file)
    with pytest.raises(SetupError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is in FP8 and has no"):
        CausalLM(ModelSpec.read(tmp_path), torch.float32, CPU)


def test_factors_of_other_blocks_are_refused() -> None:
    weight = torch.zeros(65, 24).to(torch.float8_e4m3fn)
    assert dequantise(weight, torch.ones(3, 1), BLOCK, torch.float32).shape == (65, 24)
    with pytest.raises(ValueError, match=r"65 x 24 has \(2, 1\) factors, not \(3, 1\)"):
        dequantise(weight, torch.ones(2, 1), BLOCK, torch.float32)
