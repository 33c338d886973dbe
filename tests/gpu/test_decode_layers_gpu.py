"""The fused layers on a GPU: in a CUDA graph as outside it, and as transformers' own layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks.layers import captured
from benchmarks.synthetic import synthetic_config, synthetic_spec
from services.decoder.attention.step import Step
from services.decoder.kernels.attend_part import attend_part
from services.decoder.kernels.dense import DenseOps, TorchDense
from services.decoder.kernels.gpu.dense import GpuDense
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.weights import random_weights

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
ROWS = (1, 2, 5, 8, 33)


class PlainStep(Step):
    """A step whose attention is dense and causal over the packed tokens."""

    def __init__(self) -> None:  # no heart, no rows
        pass

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return attend_part(query, key, value, scaling, causal=True).out


@dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype
    dense: type[DenseOps]
    tolerance: float


CASES = [
    Case("qwen3-8b", torch.bfloat16, GpuDense, 2e-2),
    Case("qwen3-8b", torch.bfloat16, TorchDense, 2e-2),
    Case("llama-3.1-8b", torch.bfloat16, GpuDense, 2e-2),
    Case("qwen3-0.6b", torch.bfloat16, GpuDense, 2e-2),
    Case("qwen3-0.6b", torch.float16, GpuDense, 5e-3),
    Case("qwen3-0.6b", torch.float32, GpuDense, 1e-4),
]


def run(model: CausalLM, tokens: Tensor, positions: Tensor, results: list[Tensor]) -> None:
    """One step; its hidden states and logits are put into `results`."""
    hidden = model.decode_hidden(tokens, positions, PlainStep())
    results[:] = [hidden, model.decode_logits(hidden)]


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.inference_mode()
def test_a_captured_step_equals_transformers_layers(case: Case) -> None:
    spec = synthetic_spec(synthetic_config(case.name, 3))
    weights = random_weights(spec, case.dtype, DEVICE, 0)
    with torch.no_grad():
        for name, parameter in weights.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    plain = CausalLM(spec, case.dtype, DEVICE, model=weights)
    model = CausalLM(spec, case.dtype, DEVICE, dense=case.dense(), model=weights)
    assert model.fused
    for rows in ROWS:
        tokens = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        positions = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        results: list[Tensor] = []
        graph = captured(partial(run, model, tokens, positions, results))
        for seed in range(2):
            torch.manual_seed(seed)
            tokens.copy_(torch.randint(spec.vocab_size, (rows,)))
            positions.copy_(torch.arange(rows) + 1000 * seed)
            graph.replay()
            by_graph = [result.clone() for result in results]
            eager: list[Tensor] = []
            run(model, tokens, positions, eager)
            assert all(torch.equal(a, b) for a, b in zip(by_graph, eager, strict=True))
            hidden = plain.hidden(tokens.tolist(), positions.tolist(), PlainStep())
            expected = (hidden, plain.logits(hidden))
            for got, want in zip(by_graph, expected, strict=True):
                assert float((got - want).float().norm() / want.float().norm()) < case.tolerance


@torch.inference_mode()
def test_fusing_leaves_the_memory_as_it_was() -> None:
    spec = synthetic_spec(synthetic_config("qwen3-8b", 4))
    weights = random_weights(spec, torch.bfloat16, DEVICE, 0)
    before = torch.cuda.memory_allocated()
    model = CausalLM(spec, torch.bfloat16, DEVICE, dense=TorchDense(), model=weights)
    tables = 2 * spec.max_positions * spec.head_dim * 2
    assert model.fused
    assert torch.cuda.memory_allocated() - before < tables + 2**20
