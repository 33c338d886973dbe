"""The dense twins against transformers' own modules, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from services.decoder.kernels.dense import DenseOps, TorchDense

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS: DenseOps = TorchDense()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 48), (0, 32)])
def test_norm(rows: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    theirs = LlamaRMSNorm(size, eps=1e-5)
    theirs.weight.data.copy_(torch.randn(size, generator=generator))
    theirs = theirs.to(dtype)
    x, delta = (torch.randn(rows, size, generator=generator).to(dtype) * 3 for _ in range(2))
    assert torch.equal(OPS.norm(x, theirs.weight, 1e-5), theirs(x))
    total, normed = OPS.add_norm(x, delta, theirs.weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, theirs(x + delta))
    assert total.dtype == normed.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_and_down(dtype: torch.dtype, generator: torch.Generator) -> None:
    config = LlamaConfig(hidden_size=48, num_attention_heads=4, intermediate_size=112, hidden_act="silu")
    theirs = LlamaMLP(config).to(dtype)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    x = torch.randn(5, 48, generator=generator).to(dtype)
    fused = torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight])
    mine = OPS.linear(OPS.gated(x, fused), theirs.down_proj.weight, None)
    # One product of twice the rows may sum in another order than two.
    torch.testing.assert_close(mine, theirs(x), rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-3)


def test_linear_with_bias(generator: torch.Generator) -> None:
    layer = torch.nn.Linear(20, 30)
    x = torch.randn(3, 20, generator=generator)
    assert torch.equal(OPS.linear(x, layer.weight, layer.bias), layer(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed"), [(6, 2, 16, True), (4, 4, 80, False), (3, 1, 64, True)]
)
def test_rotate(
    heads: int,
    kv_heads: int,
    dim: int,
    normed: bool,
    position_dtype: torch.dtype,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    rows = 7
    config = Qwen3Config(hidden_size=dim * heads, num_attention_heads=heads, head_dim=dim)
    rotary = LlamaRotaryEmbedding(LlamaConfig(**config.to_dict()))
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    cos, sin = (table[0] for table in rotary(qkv, torch.arange(400)[None]))
    position = torch.randint(0, 400, (rows,), generator=generator)
    norms = [Qwen3RMSNorm(dim, eps=1e-6).to(dtype) if normed else None for _ in range(2)]
    for each in norms:
        if each is not None:
            each.weight.data.copy_(torch.randn(dim, generator=generator))

    query, key, value = (
        part.view(rows, -1, dim) for part in qkv.tensor_split((heads * dim, -kv_heads * dim), 1)
    )
    if norms[0] is not None and norms[1] is not None:
        query, key = norms[0](query), norms[1](key)
    # transformers turns [batch, heads, tokens, D]: one sequence of `rows` tokens.
    expected = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], *rotary(qkv, position[None])
    )
    q_weight, k_weight = (None if each is None else each.weight for each in norms)
    position = position.to(position_dtype)
    mine = OPS.rotate(qkv, cos, sin, position, heads, kv_heads, q_weight, k_weight, 1e-6)
    assert torch.equal(mine[0], expected[0][0].transpose(0, 1))
    assert torch.equal(mine[1], expected[1][0].transpose(0, 1))
    assert torch.equal(mine[2], value)
    assert mine[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
