"""Weights saved in FP8 with a scale a block, as DeepSeek's and GLM's are, back in the model's dtype.

Knows the files: beside `x.weight` in float8_e4m3fn stands `x.weight_scale_inv`, one float32 factor for each
block of rows and columns. Knows no model; what is not quantised is read as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

_SCALE = "_scale_inv"


class ScaledBlock(NamedTuple):
    """The numbers of a weight that share a factor."""

    rows: int
    columns: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ScaledBlock | None:
        """Of a checkpoint saved that way; None for another one, quantised or not."""
        found = getattr(config, "quantization_config", None)
        if not isinstance(found, dict) or found.get("quant_method") != "fp8":
            return None
        size = found.get("weight_block_size")
        if not isinstance(size, list | tuple) or len(size) != 2:
            return None
        return cls(int(size[0]), int(size[1]))


def read_weights(path: Path, block: ScaledBlock, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint's files by name, on the CPU, those that were quantised in `dtype`.

    Raises:
        ValueError: a weight without its factors, or with too few.
        OSError: a file is not there.
    """
    found: dict[str, Tensor] = {}
    for file in _files(path):
        with safe_open(path / file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # the file is no mapping
                found[name] = weights.get_tensor(name)
    factors = {name.removesuffix(_SCALE): found.pop(name) for name in list(found) if name.endswith(_SCALE)}
    for name, weight in found.items():
        if weight.dtype == torch.float8_e4m3fn:
            if name not in factors:
                raise ValueError(f"{name} is in FP8 and has no {name}{_SCALE}")
            found[name] = dequantise(weight, factors[name], block, dtype)
    return found


def _files(path: Path) -> list[str]:
    """Those that the index names; a directory may hold others, too."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(json.loads(index.read_text())["weight_map"].values()))


def dequantise(weight: Tensor, factors: Tensor, block: ScaledBlock, dtype: torch.dtype) -> Tensor:
    """A weight in `dtype`.

    Args:
        weight: [rows, columns] float8_e4m3fn.
        factors: [ceil(rows / block.rows), ceil(columns / block.columns)] of each block.
        block: the size of one.
        dtype: of the result; the product is made in float32.

    Raises:
        ValueError: the factors are not those of such blocks.
    """
    rows, columns = weight.shape
    expected = (-(-rows // block.rows), -(-columns // block.columns))
    if tuple(factors.shape) != expected:
        raise ValueError(f"a weight of {rows} x {columns} has {tuple(factors.shape)} factors, not {expected}")
    whole = factors.float().repeat_interleave(block.rows, 0)[:rows]
    whole = whole.repeat_interleave(block.columns, 1)[:, :columns]
    return whole.mul_(weight.float()).to(dtype)
