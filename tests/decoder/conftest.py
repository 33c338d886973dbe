"""The default model, loaded once, and engines around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec


@pytest.fixture(scope="session")
def model_fp32(default_model: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(default_model), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def model_bf16(default_model: Path) -> CausalLM:
    return CausalLM(ModelSpec.read(default_model), torch.bfloat16, torch.device("cpu"))
