"""rope.cu against its twin: any head size, with and without norms, both kinds of positions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from services.decoder.kernels.dense import TorchDense
from services.decoder.kernels.gpu.dense import GpuDense
from services.decoder.kernels.gpu.rope import RopeCall, RopeShape

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Case:
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    normed: bool
    position: torch.dtype = torch.int64


CASES = [
    Case(1, 32, 8, 128, normed=True),
    Case(64, 32, 8, 128, normed=True, position=torch.int32),
    Case(5, 9, 3, 64, normed=False),
    Case(3, 1, 1, 80, normed=True),
    Case(7, 4, 2, 96, normed=False, position=torch.int32),
    Case(100, 8, 1, 256, normed=True),
    Case(2, 3, 1, 16, normed=True),
    Case(2, 2, 2, 512, normed=True),
]


def tensors(
    case: Case, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    generator = torch.Generator(device="cuda").manual_seed(case.head_dim)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").to(dtype)

    qkv = random(case.rows, (case.heads + 2 * case.kv_heads) * case.head_dim)
    position = torch.randint(0, 300, (case.rows,), generator=generator, device="cuda").to(case.position)
    norms = (random(case.head_dim), random(case.head_dim)) if case.normed else (None, None)
    return qkv, random(300, case.head_dim), random(300, case.head_dim), position, *norms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_twin(case: Case, dtype: torch.dtype) -> None:
    qkv, cos, sin, position, q_norm, k_norm = tensors(case, dtype)
    query = qkv.new_full((case.rows + 2, case.heads, case.head_dim), 7.0)
    key = qkv.new_full((case.rows + 2, case.kv_heads, case.head_dim), 7.0)
    call = RopeCall(qkv, cos, sin, position, q_norm, k_norm, query[1:-1], key[1:-1], 1e-6)
    shape = RopeShape(case.head_dim, dtype)
    call.check(shape)
    call.launch(shape)
    expected = TorchDense().rotate(qkv, cos, sin, position, case.heads, case.kv_heads, q_norm, k_norm, 1e-6)
    for mine, theirs in ((query, expected[0]), (key, expected[1])):
        if case.normed:  # a mean summed in another order moves the last place of what is turned
            error = (mine[1:-1].double() - theirs.double()).norm() / theirs.double().norm()
            assert error < (1e-3 if dtype == torch.bfloat16 else 1e-4)
        else:
            assert torch.equal(mine[1:-1], theirs)
        assert bool((mine[0] == 7).all() and (mine[-1] == 7).all()), "written outside"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "case", [*CASES, Case(2, 2, 1, 40, normed=True), Case(0, 2, 1, 64, normed=True)], ids=str
)
def test_ops_take_everything(case: Case, dtype: torch.dtype) -> None:
    qkv, cos, sin, position, q_norm, k_norm = tensors(case, dtype)
    given = (qkv, cos, sin, position, case.heads, case.kv_heads, q_norm, k_norm, 1e-6)
    for mine, theirs in zip(GpuDense().rotate(*given), TorchDense().rotate(*given), strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.03)


def test_what_the_kernel_would_read_wrongly_is_refused() -> None:
    def call(width: int, position: torch.dtype = torch.int32) -> RopeCall:
        qkv, table = torch.zeros(2, width).half(), torch.zeros(9, 64).half()
        out = torch.zeros(2, 3, 64).half()
        return RopeCall(qkv, table, table, torch.zeros(2, dtype=position), None, None, out, out[:, :1], 1e-6)

    shape = RopeShape(64, torch.float16)
    with pytest.raises(ValueError, match="qkv must be"):
        call(4 * 64).check(shape)
    with pytest.raises(ValueError, match="position must be"):
        call(5 * 64, torch.float32).check(shape)
    with pytest.raises(ValueError, match="multiple of 16"):
        call(5 * 64).check(RopeShape(72, torch.float16))
